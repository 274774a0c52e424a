"""What differs between the time of a recorded run and now: code, versions, files, machine."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferkit.config.identity import PACKAGE_DIR, RunKeys, code_files, without_places
from inferkit.config.leaves import flat
from inferkit.config.provenance import (
    PROVENANCE_FILE,
    RESOLVED_FILE,
    environment,
    git_state,
    host_facts,
    package_versions,
)
from inferkit.config.schema import InferenceConfig
from inferkit.config.secrets import secret_variables
from inferkit.config.stored import read_values
from inferkit.inspect.run_directory import RecordedRun, read_object

MAX_FILES_SHOWN = 5
ABSENT = "not set"
COMMIT_DIGITS = 10
UNHEARD = re.compile(
    r"TORCHELASTIC_.*|TORCH_CPP_LOG_LEVEL|TORCH_NCCL_ASYNC_ERROR_HANDLING"
    r"|INFERKIT_LOG_LEVEL|INFERKIT_SECRET_VARIABLES"
)
"""Variables that a launcher or this program sets, or that change logs alone."""
FOUND_BY_RANKS = {"model": "the model", "kv_blocks": "KV blocks", "platform": "the platform"}
"""Facts of provenance.json that ranks record."""
SHARES = ("platform.device_memory", "platform.num_threads")
"""What each role of a cluster gets of this machine."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One fact that was otherwise when the run was recorded."""

    kind: str
    """code, version, model, data set, environment, host, or configuration."""
    name: str
    """Of the fact within its kind; may be empty."""
    text: str
    """`2.13.0 -> 2.14.1`."""


def find_changes(run: RecordedRun, config: InferenceConfig) -> list[Change]:
    """Everything that differs from what was recorded, the weightiest first.

    Args:
        config: the recorded configuration, as it would run now.

    Raises:
        OSError: a file of model or data set cannot be read.
    """
    return [
        *_configuration(run),
        *_code(run),
        *_versions(run),
        *_files(run, config),
        *_environment(run, config),
        *_host(run),
    ]


def _configuration(run: RecordedRun) -> Iterator[Change]:
    """Keys that are newer than the run have the values of the schema."""
    keys = run.stored.unset
    if keys:
        text = f"{_some(keys)} not recorded: the schema's default is taken"
        yield Change(kind="configuration", name="", text=text)


def _code(run: RecordedRun) -> Iterator[Change]:
    recorded = run.provenance.get("identity", {})
    if not recorded:
        yield Change(kind="code", name="", text="not recorded, so it may differ")
        return
    now = code_files()
    files = [name for name in sorted({*now, *run.code}) if now.get(name) != run.code.get(name)]
    if files:
        commits = _arrow(_commit(run.git), _commit(git_state(PACKAGE_DIR) or {}))
        count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
        yield Change(kind="code", name="inferkit", text=f"{commits}; {count}: {_some(files)}")


def _commit(git: Mapping[str, Any]) -> str:
    if not git:
        return "no checkout"
    dirty = " with changes" if git.get("is_dirty") else ""
    return f"{str(git.get('commit', ''))[:COMMIT_DIGITS]}{dirty}"


def _versions(run: RecordedRun) -> Iterator[Change]:
    now = package_versions()
    recorded = run.provenance.get("versions", {})
    for name, version in recorded.items():
        if name in now and name != "inferkit" and now[name] != version:
            yield Change(kind="version", name=name, text=_arrow(version, now[name]))
    python = str(run.provenance.get("python", "")).split(" ")[0]
    if python and python != sys.version.split(" ")[0]:
        yield Change(kind="version", name="python", text=_arrow(python, sys.version.split(" ")[0]))


def _files(run: RecordedRun, config: InferenceConfig) -> Iterator[Change]:
    recorded = run.provenance.get("identity", {})
    now = RunKeys().facts(config) if recorded else {}
    for kind in ("components", "model", "dataset"):
        old, new = recorded.get(kind, {}), now.get(kind, {})
        names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        if not names:
            continue
        label = {"dataset": "data set", "components": "code"}.get(kind, kind)
        if kind == "dataset":
            yield Change(kind=label, name=str(config.data.dataset_path), text="other contents")
            continue
        for name in names:
            yield Change(kind=label, name=name, text=_presence(old.get(name), new.get(name)))


def _presence(old: Any, new: Any) -> str:
    if old is None:
        return "is new"
    return "is no more there" if new is None else "other contents"


def _environment(run: RecordedRun, config: InferenceConfig) -> Iterator[Change]:
    if "environment" not in run.provenance:
        return
    old = run.provenance["environment"]
    new = environment(os.environ, secrets=secret_variables(config))
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name) and not UNHEARD.fullmatch(name):
            text = _arrow(old.get(name, ABSENT), new.get(name, ABSENT))
            yield Change(kind="environment", name=name, text=text)


def _host(run: RecordedRun) -> Iterator[Change]:
    now = host_facts()
    for name, value in run.provenance.get("host", {}).items():
        if name in now and now[name] != value:
            yield Change(kind="host", name=name.replace("_", " "), text=_arrow(value, now[name]))


def _arrow(old: Any, new: Any) -> str:
    return f"{'none' if old is None else old} -> {'none' if new is None else new}"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - MAX_FILES_SHOWN
    return ", ".join(names[:MAX_FILES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def found_by_ranks(run: RecordedRun, replayed: Path) -> Iterator[Change]:
    """What only a run itself finds out, and has found otherwise than the recorded one: weights that
    were downloaded, the size of the KV pool, the device."""
    now = read_object(replayed / PROVENANCE_FILE)
    for name, label in FOUND_BY_RANKS.items():
        old, new = run.provenance.get(name), now.get(name)
        if old is not None and new is not None and old != new:
            text = "other files" if name == "model" else _arrow(_counts(old), _counts(new))
            yield Change(kind="run", name=label, text=text)


def _counts(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{name} {count}" for name, count in value.items())


def role_changes(recorded: Path, replayed: Path) -> Iterator[Change]:
    """What differs in the configurations of roles that a run has started itself: they are composed
    anew from the words of the recorded command. Ports, addresses and paths are left out."""
    for file in sorted(recorded.glob(f"*/**/{RESOLVED_FILE}")):
        role = file.parent.relative_to(recorded)
        other = replayed / role / RESOLVED_FILE
        if not other.is_file():
            continue
        old, new = (flat(without_places(read_values(path))) for path in (file, other))
        for key in old:
            if key in new and old[key] != new[key] and key not in SHARES:
                yield Change(kind="run", name=f"{role} {key}", text=_arrow(old[key], new[key]))
