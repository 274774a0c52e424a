"""Snapshots of what is written down: run directories, and YAML files with keys."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferkit.config.config_file import leaves_of_file, words_of_file
from inferkit.config.origins import AUTOMATIC, COMMAND_LINE, shown_path
from inferkit.config.provenance import PROVENANCE_FILE, RESOLVED_FILE
from inferkit.config.recorded import read_origins
from inferkit.config.space import ConfigSpace
from inferkit.config.yaml_lines import key_lines, line_of
from inferkit.core.errors import ConfigError
from inferkit.inspect.circumstances import circumstances
from inferkit.inspect.snapshot import Leaf, Origin, Snapshot
from inferkit.inspect.take import take_snapshot
from inferkit.sweep.cells import LOG_FILE

FILE = "file"
"""Kind of an origin: a YAML file that is no option of a group."""
METRICS_FILE = "metrics.json"
RESULT_FILE = "result.json"
MAX_RUNS_SHOWN = 3
SWEEP_FILES = ("multirun.yaml", "sweep.json")


def file_snapshot(file: Path, space: ConfigSpace, *, title: str = "") -> Snapshot:
    """The configuration of a YAML file, whole or in part; keys that it lacks have their defaults.

    Raises:
        ConfigError: it cannot be read as one.
    """
    found = take_snapshot(words_of_file(file, space), space, title=title or str(file))
    lines, own = key_lines(file), leaves_of_file(file)
    refused = {_key_of_fault(fault) for fault in found.left_out}
    leaves = {}
    for key, leaf in with_keys(found.leaves, own).items():
        line = lines.get(key) or (line_of(lines, key) if _is_typed(leaf) else 0)
        if line:
            value = own.get(key, leaf.value)
            origin = Origin(kind=FILE, text="", value=value, file=shown_path(file), line=line)
            before = [one for one in leaf.origins if one.kind not in (COMMAND_LINE, AUTOMATIC)]
            if key in refused:
                leaf = Leaf(value=value)
            made = leaf.origins[-1:] if value != leaf.value and _is_automatic(leaf) else ()
            leaf = replace(leaf, origins=(*before, origin, *made))
        leaves[key] = leaf
    # What does not compose is shown as the file has it.
    return replace(found, leaves=leaves, left_out=(), choices={}, choosers={})


def with_keys(leaves: Mapping[str, Leaf], own: Mapping[str, Any]) -> dict[str, Leaf]:
    """`leaves`, and what a file has beside them: keys that this version does not know."""
    unknown = {key: Leaf(value=value) for key, value in own.items() if key not in leaves}
    return dict(leaves) | {
        key: leaf
        for key, leaf in unknown.items()
        if not (leaf.value == {} and any(name.startswith(f"{key}.") for name in leaves))
    }


def _key_of_fault(text: str) -> str:
    """`a.b` of `a.b=1: is no text`, and of `a.b: has no value`."""
    return re.split("[=:]", text.lstrip("+~"), maxsplit=1)[0]


def _is_typed(leaf: Leaf) -> bool:
    """Whether it is one of the words that stand for the file."""
    return any(origin.kind == COMMAND_LINE for origin in leaf.origins)


def _is_automatic(leaf: Leaf) -> bool:
    return bool(leaf.origins) and leaf.origins[-1].kind == AUTOMATIC


def run_snapshot(run_dir: Path, space: ConfigSpace, *, title: str = "") -> Snapshot:
    """The configuration that a run directory records, as this version understands it.

    Raises:
        ConfigError: it is none.
    """
    file = run_dir / RESOLVED_FILE
    if not file.is_file():
        raise ConfigError(_no_run(run_dir))
    provenance = read_json(run_dir / PROVENANCE_FILE)
    found = take_snapshot(
        words_of_file(file, space),
        space,
        title=title or str(run_dir),
        num_blocks=provenance.get("kv_blocks"),
    )
    recorded = leaves_of_file(file)
    origins = read_origins(run_dir)
    choices: dict[str, str | None] = provenance.get("choices", {})
    metrics = read_json(run_dir / METRICS_FILE)
    return replace(
        found,
        leaves={
            key: Leaf(value=recorded.get(key, leaf.value), origins=origins.get(key, ()))
            for key, leaf in with_keys(found.leaves, recorded).items()
        },
        left_out=(),
        choices={name: choices[name] for name in reversed(choices) if "hydra/" not in name},
        choosers={name: origins[name] for name in reversed(choices) if name in origins},
        notes=(
            *found.notes,
            *_notes(run_dir, [key for key in found.leaves if key not in recorded]),
        ),
        metrics=metrics or None,
        circumstances=circumstances(provenance),
    )


def _no_run(folder: Path) -> str:
    runs = [path.parent for path in folder.glob(f"*/{RESOLVED_FILE}")]
    runs.sort(key=lambda run: (len(run.name), run.name))
    if runs and any((folder / name).is_file() for name in SWEEP_FILES):
        return f"{folder}: is a sweep; name the folder of one of its cells, as {runs[0]}"
    if (folder / LOG_FILE).is_file():
        return (
            f"{folder}: is a cell that ended before its run began: it has no {RESOLVED_FILE}; what "
            f"it printed is in {folder / LOG_FILE}"
        )
    inside = f"; runs in it are {', '.join(map(str, runs[:MAX_RUNS_SHOWN]))}" if runs else ""
    more = ", ..." if len(runs) > MAX_RUNS_SHOWN else ""
    return f"{folder}: is no run directory: it has no {RESOLVED_FILE}{inside}{more}"


def _notes(run_dir: Path, missing: list[str]) -> list[str]:
    """What a reader of the comparison must know of the run."""
    notes = []
    if missing:
        notes.append(
            f"was recorded by a version without {', '.join(missing)}; the defaults are shown"
        )
    result = read_json(run_dir / RESULT_FILE)
    status = result.get("status")
    if status is None:
        notes.append(f"has no {RESULT_FILE}: the run has not ended, or was killed")
    elif status != "ok":
        error = f": {result['error']}" if result.get("error") else ""
        notes.append(f"the run ended with status {status}{error}")
    return notes


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file.

    Raises:
        ConfigError: it is there and cannot be read.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}
