"""Configurations that were written down: config.resolved.yaml of a run, read back.

What runs is the file: no option of conf/ is looked at.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from inferkit.config.keys import is_node, type_hints
from inferkit.config.schema import DecodeSchedulerConfig, InferenceConfig, SchedulerConfig
from inferkit.core.errors import ConfigError

SCHEDULERS: tuple[type[SchedulerConfig], ...] = (SchedulerConfig, DecodeSchedulerConfig)
"""Schemas of the node `scheduler`; the first that knows all its keys is taken."""


@dataclass(frozen=True, kw_only=True)
class StoredConfig:
    """A configuration as far as this version of inferkit understands it."""

    cfg: DictConfig
    """Typed; keys that the file lacks have the schema's defaults."""
    unknown: tuple[str, ...] = ()
    """Keys of the file that the schema does not have."""
    unset: tuple[str, ...] = ()
    """Keys of the schema that the file does not have."""
    misfits: tuple[str, ...] = ()
    """`key=value: why` of values that are not of the schema's type."""


def read_stored(file: Path) -> StoredConfig:
    """Read a file that holds all keys of a configuration; nothing is checked beyond its types.

    A secret is written as `${oc.env:NAME}`: it is taken from that variable again.

    Raises:
        ConfigError: the file cannot be read, or is no YAML of nested keys.
    """
    values = read_values(file)
    cfg = OmegaConf.structured(InferenceConfig)
    scheduler = values.get("scheduler")
    if isinstance(scheduler, Mapping):
        cfg.scheduler = OmegaConf.structured(_schema_of(scheduler))
    unknown: list[str] = []
    unset: list[str] = []
    misfits: list[str] = []
    for kind, text in _fill(cfg, values, ""):
        {"unknown": unknown, "unset": unset, "misfit": misfits}[kind].append(text)
    return StoredConfig(cfg=cfg, unknown=tuple(unknown), unset=tuple(unset), misfits=tuple(misfits))


def read_values(file: Path) -> dict[str, Any]:
    """The nested values of a YAML file, as they are written.

    Raises:
        ConfigError: it cannot be read, or holds no nested keys.
    """
    try:
        loaded = OmegaConf.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{file} is no YAML: {first}") from None
    values = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds {type(values).__name__}, no configuration")
    return {str(key): value for key, value in values.items()}


def _schema_of(scheduler: Mapping[Any, Any]) -> type[SchedulerConfig]:
    for schema in SCHEDULERS:
        if set(map(str, scheduler)) <= set(type_hints(OmegaConf.structured(schema))):
            return schema
    return SchedulerConfig


def _fill(node: DictConfig, values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Put values into a typed node; yields what does not fit, as (kind, text)."""
    hints = type_hints(node)
    for name in hints:
        if name not in values:
            yield "unset", f"{prefix}{name}"
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in hints:
            yield "unknown", key
        elif is_node(hints[name]) and isinstance(value, Mapping):
            yield from _fill(node[name], value, f"{key}.")
        else:
            try:
                node[name] = value
            except OmegaConfBaseException as error:
                yield "misfit", f"{key}={value}: {str(error).splitlines()[0]}"
