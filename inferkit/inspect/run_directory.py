"""A run directory as it was left: what was recorded of the run, and what it generated."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferkit.config.identity import CODE_FILE
from inferkit.config.provenance import PROVENANCE_FILE, RESOLVED_FILE
from inferkit.config.stored import StoredConfig, read_stored
from inferkit.core.errors import ConfigError

SWEEP_FILES = ("sweep.json", "multirun.yaml")


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a run directory tells, before anything of it is started again."""

    folder: Path
    """Absolute."""
    stored: StoredConfig
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Empty where the file is missing."""
    code: Mapping[str, str] = field(default_factory=dict)
    """File -> hash; empty where it was not recorded."""

    @property
    def cwd(self) -> Path | None:
        """Where the run was started; None = not recorded, or no more there."""
        path = self.provenance.get("cwd")
        return Path(path) if path and Path(path).is_dir() else None

    @property
    def git(self) -> Mapping[str, Any]:
        """commit, is_dirty, changed_files; empty outside a checkout."""
        return self.provenance.get("git") or {}


def read_run(folder: Path) -> RecordedRun:
    """Read a run directory.

    Raises:
        ConfigError: it is none, or one of its files cannot be read.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the folder of a run, such as outputs/...")
    if not (folder / RESOLVED_FILE).is_file():
        raise ConfigError(_no_run(folder))
    return RecordedRun(
        folder=folder,
        stored=read_stored(folder / RESOLVED_FILE),
        provenance=read_object(folder / PROVENANCE_FILE),
        code=read_object(folder / CODE_FILE),
    )


def _no_run(folder: Path) -> str:
    text = f"{folder} holds no {RESOLVED_FILE}"
    cells = [path.parent.name for path in folder.glob(f"*/{RESOLVED_FILE}")]
    if cells and any((folder / name).exists() for name in SWEEP_FILES):
        first = min(cells, key=lambda name: (len(name), name))
        return f"{text}: it is a sweep; name one of its cells, such as {folder / first}"
    nodes = sorted(path.parent for path in folder.glob(f"node*/{RESOLVED_FILE}"))
    if nodes:
        return f"{text}: it is that of one node of several; name {nodes[0]}"
    return f"{text}, so it is no folder of a run"


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value
