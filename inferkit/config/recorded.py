"""Where the values of a run come from, as its folder records it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from inferkit.config.automatic import with_automatic
from inferkit.config.choices import find_choosers
from inferkit.config.origins import Origin, Origins, find_origins
from inferkit.config.provenance import write_json
from inferkit.config.schema import InferenceConfig
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError

ORIGINS_FILE = "origins.json"
"""Dotted key, or group -> list of who set or chose it, the last one won; each has the fields of
Origin. Where a key has the name of a group (`role`), it is the key."""


def origins_of_job(hydra: Any) -> Origins:
    """The origins of what Hydra has composed for a job, keys and groups.

    Args:
        hydra: the `hydra` node of the job.
    """
    folders = {source.provider: Path(source.path) for source in hydra.runtime.config_sources}
    space = ConfigSpace(
        conf_dir=folders["main"],
        config_dir=folders.get("command-line"),
        config_name=hydra.job.config_name,
    )
    words = task_overrides(hydra)
    return find_choosers(space, words) | find_origins(space, words)


def task_overrides(hydra: Any) -> tuple[str, ...]:
    """The overrides of a job as they were typed: to look at one alone would resolve its `${...}`,
    which may be a secret.

    Args:
        hydra: the `hydra` node of the job.
    """
    typed = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    assert isinstance(typed, list), "overrides are a list"
    return tuple(map(str, typed))


def write_origins(run_dir: Path, config: InferenceConfig, origins: Origins) -> None:
    """Record where every value of a run's configuration comes from, automatic ones included.

    Nothing is written where that is not known (a configuration that was made in Python).
    """
    if not origins:
        return
    of_keys = with_automatic(origins, config)
    found = {key: all_of_key for key, all_of_key in origins.items() if key not in of_keys} | of_keys
    write_json(
        run_dir / ORIGINS_FILE,
        {key: [asdict(origin) for origin in all_of_key] for key, all_of_key in found.items()},
    )


def read_origins(run_dir: Path) -> Mapping[str, tuple[Origin, ...]]:
    """What `write_origins` wrote; empty where there is no such file (an older run).

    Raises:
        ConfigError: it cannot be read.
    """
    file = run_dir / ORIGINS_FILE
    if not file.exists():
        return {}
    try:
        data = json.loads(file.read_text("utf-8"))
        return {key: tuple(Origin(**one) for one in found) for key, found in data.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
