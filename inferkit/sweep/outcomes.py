"""What the cells of a sweep have left in its folder: how each ended, its metrics, what it varied.

DIR/sweep.json              the command of the sweep, and its cells
DIR/<n>/result.json         how cell n ended
DIR/<n>/metrics.json        its metrics
DIR/<n>/generations.jsonl   or requests.jsonl: the times of its requests
DIR/<n>/config.resolved.yaml
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from inferkit.config.faults import key_of
from inferkit.config.provenance import RESOLVED_FILE
from inferkit.config.sweep_rules import (
    GOODPUT,
    GOODPUT_PER_DEVICE,
    SLO_ATTAINMENT,
    TOKENS_PER_S,
    TOKENS_PER_S_PER_DEVICE,
)
from inferkit.sweep.cells import INVALID, OK, RESULT_FILE
from inferkit.sweep.goodput import RequestTimes, attainment, goodput, offered

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast where the C library is there."""
METRICS_FILE = "metrics.json"
SWEEP_FILE = "sweep.json"
REQUEST_FILES = ("requests.jsonl", "generations.jsonl")
LEFT_OUT = ("expert_load.layers.",)
"""Metrics of single layers are no columns of a table."""
NO_LIMITS: Mapping[str, float] = {}
OFFERED_RATE = "offered_request_per_s"
"""Of a load with a rate: as it was sent, not as load.rate asks for."""
NOT_RUN, DAMAGED = "not run", "damaged"
NEVER_RUN = (INVALID, NOT_RUN)
MAX_NAME_LEN = 16
"""Characters; of a longer key the end names an axis."""
NOT_GIVEN = "default"
"""Value of an axis in a cell that does not set it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one cell ended."""

    number: int
    overrides: tuple[str, ...]
    status: str
    run_dir: Path
    seconds: float = 0.0
    error: str = ""
    """First line of what went wrong; empty where nothing did."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Flat: `ttft_s.p50` -> 0.12; with the figures that follow from limits and devices."""
    requests: tuple[RequestTimes, ...] = ()
    """Read where there are limits."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Nested, as it ran; empty where the cell did not come that far."""

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def num_devices(self) -> int:
        """Ranks of all instances."""
        counted = self.metrics.get("num_devices")
        return int(counted or self.config.get("parallel", {}).get("world_size") or 1)

    def number_of(self, metric: str) -> float | None:
        """A metric of a cell that ended well, as a number."""
        value = self.metrics.get(metric) if self.is_ok else None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if is_number and value is not None else None


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A key that has not the same value in every cell."""

    key: str
    name: str
    """The key, or just its end where that says enough."""
    values: tuple[str, ...]
    """Rising where all are numbers, else in the order in which the cells have them."""
    is_numeric: bool

    def value_in(self, values: Mapping[str, str]) -> str:
        """Of the cell with these `values_of` overrides."""
        return values.get(self.key, NOT_GIVEN)


def read_sweep(sweep_dir: Path) -> dict[str, Any]:
    """sweep.json; empty where a sweep has left none."""
    path = sweep_dir / SWEEP_FILE
    record: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return record


def read_outcomes(sweep_dir: Path) -> list[Outcome]:
    """All cells by number; those of sweep.json that have no result were not run."""
    record = read_sweep(sweep_dir)
    limits, listed = limits_of(record.get("sweep", {})), record.get("cells")
    if listed:
        return [_outcome_of(sweep_dir / str(cell["folder"]), cell, limits) for cell in listed]
    folders = [path.parent for path in sweep_dir.glob(f"*/{RESULT_FILE}")]
    # A folder that cannot be read has no number of its own.
    cells = (_outcome(folder, limits, number) for number, folder in enumerate(folders))
    return sorted(cells, key=lambda cell: cell.number)


def _outcome_of(run_dir: Path, cell: Mapping[str, Any], limits: Mapping[str, float]) -> Outcome:
    """Of a cell as sweep.json lists it."""
    facts: dict[str, Any] = {"number": cell["number"], "overrides": tuple(cell["overrides"])}
    if not (run_dir / RESULT_FILE).is_file():
        return Outcome(status=NOT_RUN, run_dir=run_dir, **facts)
    return replace(_outcome(run_dir, limits, facts["number"]), **facts)


def _outcome(run_dir: Path, limits: Mapping[str, float], number: int) -> Outcome:
    """Of a cell that has a result, though it may be one that nobody can read."""
    try:
        return read_outcome(run_dir, limits)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        text = f"its files cannot be read: {error}"
        return Outcome(
            number=number, overrides=(), status=DAMAGED, run_dir=run_dir, error=text.splitlines()[0]
        )


def read_outcome(run_dir: Path, limits: Mapping[str, float] = NO_LIMITS) -> Outcome:
    """The result of one cell, or of a run.

    Args:
        limits: of a good request; empty = those that its own configuration has.

    Raises:
        OSError, ValueError, KeyError, TypeError, YAMLError: a file of it is missing or damaged.
    """
    result = json.loads((run_dir / RESULT_FILE).read_text("utf-8"))
    resolved, metrics_file = run_dir / RESOLVED_FILE, run_dir / METRICS_FILE
    config = yaml.load(resolved.read_text("utf-8"), LOADER) if resolved.is_file() else {}
    metrics = result["metrics"] or {}
    if metrics_file.is_file():
        metrics = json.loads(metrics_file.read_text("utf-8")) | metrics
    outcome = Outcome(
        number=int(result["number"]),
        overrides=tuple(result["overrides"]),
        status=str(result["status"]),
        run_dir=run_dir,
        seconds=float(result["seconds"] or 0.0),
        error=str(result["error"] or ""),
        metrics=flat_metrics(metrics),
        config=config,
    )
    return _with_derived(outcome, limits or limits_of(config.get("sweep") or {}))


def limits_of(sweep: Mapping[str, Any]) -> dict[str, float]:
    """The limits of a node `sweep` that are set, in seconds."""
    slo = sweep.get("slo") or {}
    return {name: float(value) for name, value in slo.items() if value is not None}


def flat_metrics(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers and texts by dotted name, without lists and without what single layers have."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= flat_metrics(value, f"{key}.")
        elif not isinstance(value, list) and not key.startswith(LEFT_OUT):
            flat[key] = value
    return flat


def find_axes(cells: Sequence[Outcome], searched: Sequence[str] = ()) -> list[Axis]:
    """Keys that vary, in the order of the command line.

    Args:
        searched: keys of a search; they are axes also where all trials have drawn one value.
    """
    given = {cell.number: values_of(cell.overrides) for cell in cells}
    keys = dict.fromkeys(key for values in given.values() for key in values)
    swept = []
    for key in keys:
        values = [given[cell.number].get(key, NOT_GIVEN) for cell in cells]
        distinct = list(dict.fromkeys(values))
        if len(distinct) < 2 and key not in searched:
            continue
        is_numeric = all(as_number(value) is not None for value in distinct)
        if is_numeric:
            distinct.sort(key=lambda value: as_number(value) or 0.0)
        swept.append((key, tuple(distinct), is_numeric))
    ends = Counter(_end(key) for key, _, _ in swept)
    return [
        Axis(key=key, name=_name(key, ends), values=values, is_numeric=is_numeric)
        for key, values, is_numeric in swept
    ]


def _end(key: str) -> str:
    return key.rpartition(".")[2]


def _name(key: str, ends: Mapping[str, int]) -> str:
    is_clear = len(key) > MAX_NAME_LEN and ends[_end(key)] == 1
    return _end(key) if is_clear else key


def values_of(overrides: Iterable[str]) -> dict[str, str]:
    """Key -> value as typed, without quotes around the whole."""
    values = {}
    for text in overrides:
        value = text.partition("=")[2]
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        values[key_of(text)] = "removed" if text.startswith("~") else value
    return values


def as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _with_derived(cell: Outcome, limits: Mapping[str, float]) -> Outcome:
    """The outcome with the figures per device, and those of limits where there are any."""
    metrics, devices = dict(cell.metrics), cell.num_devices
    requests = _read_requests(cell.run_dir) if limits and cell.is_ok else ()
    tokens_per_s, wall_time_s = metrics.get(TOKENS_PER_S), metrics.get("wall_time_s")
    if tokens_per_s is not None:
        metrics["num_devices"] = devices
        metrics[TOKENS_PER_S_PER_DEVICE] = tokens_per_s / devices
    if requests:
        rate = goodput(requests, limits, wall_time_s=wall_time_s)
        metrics[SLO_ATTAINMENT] = attainment(requests, limits)
        metrics[GOODPUT] = rate
        if ((cell.config.get("load") or {}).get("rate")) is not None:
            metrics[OFFERED_RATE] = offered(requests)
        metrics[GOODPUT_PER_DEVICE] = None if rate is None else rate / devices
    return replace(cell, metrics=metrics, requests=requests)


def _read_requests(run_dir: Path) -> tuple[RequestTimes, ...]:
    path = next((run_dir / name for name in REQUEST_FILES if (run_dir / name).is_file()), None)
    if path is None:
        return ()
    lines = path.read_text("utf-8").split("\n")
    return tuple(RequestTimes.from_record(json.loads(line)) for line in lines if line)
