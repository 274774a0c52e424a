"""What a report shows of one run: from its folder to the parts of a page."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from inferkit.config.origins import ADDED, AUTOMATIC, COMMAND_LINE, SCHEMA
from inferkit.config.provenance import PROVENANCE_FILE
from inferkit.config.space import ConfigSpace
from inferkit.inspect.recorded import read_json, run_snapshot
from inferkit.inspect.report.figures import figure_text, metrics_part, tiles
from inferkit.inspect.report.page import (
    DerivedRow,
    Failure,
    Key,
    Overridden,
    Page,
    Picture,
    Row,
)
from inferkit.inspect.report.requests import read_generations, requests_table
from inferkit.inspect.snapshot import Leaf, Origin, Snapshot
from inferkit.inspect.wording import derived_text, origin_text, value_text
from inferkit.offline.summary import shorten
from inferkit.sweep.cells import OK, RESULT_FILE
from inferkit.sweep.table import number_text

MAX_OVERRIDE_LEN = 60
PICTURES = {"steps.png": "Time of every step by kind, and what the steps held"}
LOAD_RUNNER = ".LoadRunner"
NOT_ENDED = "has not ended"
EMPTY: tuple[Any, ...] = (None, "", {}, [])


def run_page(run_dir: Path, space: ConfigSpace) -> Page:
    """The report of a run.

    Raises:
        ConfigError: `run_dir` is none, or a file in it cannot be read.
    """
    snapshot = run_snapshot(run_dir, space)
    result = read_json(run_dir / RESULT_FILE)
    provenance = read_json(run_dir / PROVENANCE_FILE)
    metrics = dict(snapshot.metrics or result.get("metrics") or {})
    status = str(result.get("status") or NOT_ENDED)
    generations, more = read_generations(run_dir)
    return Page(
        title=run_title(snapshot),
        status=status,
        is_ok=status == OK,
        facts=_facts(run_dir, result, provenance),
        command=str(provenance.get("command") or ""),
        tiles=tiles(metrics),
        errors=_failures(result),
        notes=notes(snapshot),
        pictures=pictures(run_dir),
        metrics=metrics_part(metrics),
        generations=generations,
        more_generations=more,
        requests=requests_table(run_dir),
        choices=choices(snapshot),
        nodes=nodes(snapshot),
        derived=derived_rows(snapshot),
        provenance=list(provenance_rows(provenance)),
    )


def run_title(snapshot: Snapshot) -> str:
    """`smollm2-135m: offline run`, `qwen3-8b: load on role cluster`."""
    name = _value(snapshot, "model.name") or "inferkit"
    if snapshot.role is None:
        return f"{name}: offline run"
    is_load = _value(snapshot, "runner._target_").endswith(LOAD_RUNNER)
    return f"{name}: {'load on ' if is_load else ''}role {snapshot.role}"


def _value(snapshot: Snapshot, key: str) -> str:
    return str(snapshot.leaves[key].value) if key in snapshot.leaves else ""


def nodes(snapshot: Snapshot) -> list[list[Key]]:
    """The keys, those of one node together."""
    keys = [_key(key, leaf) for key, leaf in snapshot.leaves.items()]
    return [list(found) for _, found in groupby(keys, key=lambda one: one.key.partition(".")[0])]


def choices(snapshot: Snapshot) -> list[str]:
    """`parallel=tp2` of every group that has an option."""
    found = snapshot.choices.items()
    return [f"{group}={option}" for group, option in found if option is not None]


def derived_rows(snapshot: Snapshot) -> list[DerivedRow]:
    return [
        DerivedRow(name=one.name, value=derived_text(one), formula=one.formula)
        for one in snapshot.derived
    ]


def notes(snapshot: Snapshot) -> list[str]:
    """What a reader must know; how the run ended is told elsewhere."""
    faults = [f"this version of inferkit refuses it: {fault}" for fault in snapshot.faults]
    return [*faults, *snapshot.warnings, *snapshot.notes]


def pictures(folder: Path) -> list[Picture]:
    found = [folder / name for name in PICTURES if (folder / name).is_file()]
    return [Picture(path=path, text=PICTURES[path.name]) for path in found]


def provenance_rows(provenance: Mapping[str, Any]) -> Iterator[Row]:
    """What is recorded beside the command and the choices, which are shown elsewhere."""
    for name, value in provenance.items():
        if name in ("command", "overrides", "choices") or value in EMPTY:
            continue
        if isinstance(value, Mapping):
            texts = (f"{key} {_plain(key, one)}" for key, one in value.items() if one not in EMPTY)
            yield Row(name=name, value="\n".join(texts))
        else:
            yield Row(name=name, value=_plain(name, value))


def _plain(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(key, one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(name, one) for one in value)
    return figure_text(name, value) if name.endswith("_bytes") else value_text(value)


def _key(key: str, leaf: Leaf) -> Key:
    if not leaf.origins:
        return Key(key=key, value=value_text(leaf.value))
    last, *others = reversed(leaf.origins)
    return Key(
        key=key,
        value=value_text(leaf.value),
        set_by=_who(last),
        instead_of=tuple(
            Overridden(value=value_text(origin.value), who=_who(origin)) for origin in others
        ),
        kind=_kind({origin.kind for origin in leaf.origins}),
    )


def _who(origin: Origin) -> str:
    """A long override, which sets many keys, loses its end."""
    return origin_text(replace(origin, text=shorten(origin.text, MAX_OVERRIDE_LEN)))


def _kind(kinds: set[str]) -> str:
    if kinds <= {SCHEMA, AUTOMATIC}:
        return "default"
    return "set" if kinds & {COMMAND_LINE, *ADDED} else ""


def _facts(run_dir: Path, result: Mapping[str, Any], provenance: Mapping[str, Any]) -> list[str]:
    facts = []
    if provenance.get("started_at"):
        facts.append(f"started {when_text(provenance['started_at'])}")
    if result.get("seconds"):
        facts.append(f"took {number_text(float(result['seconds']))} s")
    host = provenance.get("host") or {}
    if host.get("name"):
        facts.append(f"on {host['name']}")
    return [*facts, str(run_dir)]


def when_text(time: str) -> str:
    """`2026-01-31 12:00:00 +0000`."""
    return f"{time[:10]} {time[11:19]} {time[19:]}".strip()


def _failures(result: Mapping[str, Any]) -> list[Failure]:
    status = result.get("status")
    if status in (None, OK):
        return []
    return [
        Failure(
            title=str(status),
            text=str(result.get("error") or ""),
            traceback=str(result.get("traceback") or ""),
        )
    ]
