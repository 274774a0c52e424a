"""The step-time picture of a run. Only this module imports matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from inferkit.scheduler.step_record import StepKind, StepRecord, by_dp_rank

# Distinguishable for the colour-blind (Okabe and Ito), and by shape in black and white.
STYLES: dict[StepKind, tuple[str, str]] = {
    "prefill": ("#D55E00", "^"),
    "mixed": ("#E69F00", "s"),
    "decode": ("#0072B2", "o"),
}
KV_COLOUR = "#009E73"
REQUESTS_COLOUR = "#555555"
HEADROOM = 1.08
ABOVE_RIGHT: dict[str, Any] = {
    "loc": "lower right",
    "bbox_to_anchor": (1.0, 1.0),
    "ncols": 3,
    "frameon": False,
}
"""A legend above the axes never hides a point."""
LOG_RATIO = 10
"""The time axis is logarithmic where the longest step takes this many times the median."""


def plot_steps(records: Sequence[StepRecord], path: Path) -> bool:
    """Write a PNG: time of every step by kind; below it, KV use and requests of the step.

    False where there is no step: nothing is written.
    """
    if not records:
        return False
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    times, use = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _plot_times(times, records)
    _plot_use(use, records)
    use.set_xlabel("step")
    use.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)
    return True


def _plot_times(axes: Axes, records: Sequence[StepRecord]) -> None:
    for kind, (colour, marker) in STYLES.items():
        steps = [record for record in records if record.kind == kind]
        if steps:
            axes.plot(
                [record.step for record in steps],
                [record.step_time_s * 1e3 for record in steps],
                linestyle="none",
                marker=marker,
                markersize=5,
                color=colour,
                label=f"{kind} ({len(steps)})",
            )
    axes.set_ylabel("step time in ms")
    times = [record.step_time_s for record in records]
    if max(times) > LOG_RATIO * sorted(times)[len(times) // 2] > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif max(times) > 0:
        axes.set_ylim(0, max(times) * 1e3 * HEADROOM)
    axes.grid(alpha=0.3, which="both")
    axes.legend(**ABOVE_RIGHT)
    axes.set_title("Time of every step (number of steps)", loc="left")


def _plot_use(axes: Axes, records: Sequence[StepRecord]) -> None:
    requests = axes.twinx()
    ranks = by_dp_rank(records)
    for of_rank in ranks:
        steps = [record.step for record in of_rank]
        kv_percent = [100 * record.kv_used / max(1, record.kv_total) for record in of_rank]
        axes.fill_between(steps, kv_percent, step="mid", color=KV_COLOUR, alpha=0.25 / len(ranks))
        axes.plot(steps, kv_percent, drawstyle="steps-mid", color=KV_COLOUR)
        requests.plot(
            steps,
            [record.num_requests for record in of_rank],
            drawstyle="steps-mid",
            color=REQUESTS_COLOUR,
            linestyle="--",
        )
    axes.set_ylabel("KV blocks in use, %", color=KV_COLOUR)
    axes.set_ylim(0, 100 * HEADROOM)
    axes.grid(alpha=0.3)
    requests.set_ylabel("requests in the step", color=REQUESTS_COLOUR)
    requests.set_ylim(0, max(record.num_requests for record in records) * HEADROOM)
    requests.yaxis.set_major_locator(MaxNLocator(integer=True))
    kv_total = records[0].kv_total
    axes.legend(
        handles=[
            Line2D([], [], color=KV_COLOUR, label=f"KV blocks in use (of {kv_total})"),
            Line2D([], [], color=REQUESTS_COLOUR, linestyle="--", label="requests in the step"),
        ],
        **ABOVE_RIGHT,
    )
    of_each = f" of each of {len(ranks)} DP ranks" if len(ranks) > 1 else ""
    axes.set_title(f"What the step{of_each} held", loc="left")
