"""Metrics as a report shows them: by their names, with units."""

from collections.abc import Mapping
from typing import Any

from inferkit.inspect.report.page import Metrics, Row, StatisticRow, Tile
from inferkit.inspect.wording import size_text
from inferkit.sweep.table import number_text

STATISTICS = ("mean", "p50", "p90", "p99", "num")
LEFT_OUT = "expert_load"


def tiles(metrics: Mapping[str, Any]) -> list[Tile]:
    """Those of the figures that matter most which the run has."""
    found = []

    def add(label: str, value: float | None, unit: str = "", factor: float = 1.0) -> None:
        if value is not None:
            found.append(Tile(label=label, value=number_text(value * factor), unit=unit))

    add("output tokens per second", metrics.get("output_tokens_per_s"))
    add("requests per second", metrics.get("request_per_s"))
    for name, text in (("ttft_s", "to the first token"), ("tpot_s", "per output token")):
        times = metrics.get(name) or {}
        add(f"{text}, p50", times.get("p50"), "ms", 1e3)
        add(f"{text}, p99", times.get("p99"), "ms", 1e3)
    add("requests", metrics.get("num_requests"))
    add("failed requests", metrics.get("num_failed") or None)
    add("wall time", metrics.get("wall_time_s"), "s")
    if metrics.get("peak_memory_bytes"):
        add("peak memory", metrics["peak_memory_bytes"], "MiB", 2.0**-20)
    return found


def metrics_part(metrics: Mapping[str, Any]) -> Metrics | None:
    """Statistics as a table, everything else as names with values."""
    if not metrics:
        return None
    statistics: list[StatisticRow] = []
    figures: list[Row] = []

    def add(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and "p50" in value and "num" in value:
                if value["num"]:
                    texts = tuple(_statistic(column, value[column]) for column in STATISTICS)
                    statistics.append(StatisticRow(name=key, texts=texts))
            elif isinstance(value, Mapping):
                kept = {k: v for k, v in value.items() if k != "layers" or name != LEFT_OUT}
                add(kept, f"{key}.")
            elif value is not None and not isinstance(value, list):
                figures.append(Row(name=key, value=figure_text(key, value)))

    add(metrics, "")
    return Metrics(columns=STATISTICS, statistics=tuple(statistics), figures=tuple(figures))


def figure_text(name: str, value: Any) -> str:
    """A metric with its unit, by its name."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_bytes"):
        return size_text(int(value))
    if name.endswith("_s") and not name.endswith("_per_s"):
        return time_text(float(value))
    return f"{value:,}" if isinstance(value, int) else number_text(value)


def time_text(seconds: float) -> str:
    """`185 ms`, `12.4 s`."""
    return f"{number_text(seconds * 1e3)} ms" if abs(seconds) < 1 else f"{number_text(seconds)} s"


def _statistic(column: str, value: Any) -> str:
    return str(value) if column == "num" else time_text(float(value))
