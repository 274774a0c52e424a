"""DIR/sweep.json: what was asked of a sweep, so that it can be summed up and resumed.

command     as typed, to be copied
flags, overrides
            the words of it, without the folder of the sweep
cwd         where it was started: relative paths in the words are of there
sweep       the node `sweep` of the configuration: objective, limits, ...
cells       [{number, folder, overrides}], all of the grid; a cell without DIR/<folder>/result.json
            was not run; empty of a search
axes        keys that a search varies; empty of a grid
trials      [folder] of a search that has come to its end
started_at, ended_at
            of the latest start; ended_at is null while it runs and where it was killed
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inferkit.config.provenance import write_json
from inferkit.core.errors import ConfigError

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """The contents of sweep.json."""

    command: str
    flags: tuple[str, ...]
    overrides: tuple[str, ...]
    cwd: str
    sweep: Mapping[str, Any] = field(default_factory=dict)
    cells: Sequence[Mapping[str, Any]] = ()
    axes: Sequence[str] = ()
    trials: Sequence[str] = ()
    started_at: str = ""
    ended_at: str | None = None

    def write(self, sweep_dir: Path) -> None:
        write_json(sweep_dir / SWEEP_FILE, asdict(self))


def read_record(sweep_dir: Path) -> SweepRecord:
    """Raises:
    ConfigError: the folder is not that of a sweep.
    """
    path = sweep_dir / SWEEP_FILE
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(_no_sweep(sweep_dir)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    for name in ("flags", "overrides", "cells", "axes", "trials"):
        values[name] = tuple(values.get(name, ()))
    return SweepRecord(**values)


def _no_sweep(sweep_dir: Path) -> str:
    if not sweep_dir.is_dir():
        return f"{sweep_dir}: there is no such folder"
    return (
        f"{sweep_dir} is no folder of a sweep (it has no {SWEEP_FILE}); a sweep leaves one in "
        "outputs/sweeps/<date>/<time>-<n>, or where hydra.sweep.dir says"
    )


def now_text() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
