"""Pictures of a sweep: throughput and latency over its axes, and what keeps the limits.

Imports matplotlib, as plot_style.py and plot_pareto.py do; nothing else of this package does.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from inferkit.config.sweep_rules import (
    GOODPUT,
    GOODPUT_PER_DEVICE,
    SLO_ATTAINMENT,
    TOKENS_PER_S,
    TOKENS_PER_S_PER_DEVICE,
)
from inferkit.sweep.goodput import attainment, limits_text
from inferkit.sweep.outcomes import OFFERED_RATE, Axis, Outcome
from inferkit.sweep.plot_pareto import plot_pareto
from inferkit.sweep.plot_plan import RATE, Plan, PlotColumn, cell_label, in_lines, plan_of
from inferkit.sweep.plot_style import (
    CROSS,
    GREY,
    THIN,
    colour_of,
    label_x,
    line_style,
    log_scale,
    new_figure,
    number_text,
    save,
    series_legend,
)

THROUGHPUT_LATENCY = "throughput_latency.png"
PARETO = "pareto.png"
GOODPUT_OVER_AXES = "goodput.png"
OTHER_LIMITS = "slo_scale.png"
PICTURES = (THROUGHPUT_LATENCY, PARETO, GOODPUT_OVER_AXES, OTHER_LIMITS)
HEADROOM = 1.08
LATENCY_RATIO = 20.0
"""A time is drawn on a logarithmic axis where the longest is this many times the shortest."""
SCALES = tuple(2.0 ** (step / 8) for step in range(-24, 25))
"""Factors on the limits: from an eighth to eight times."""
MAX_CURVES = 7
BAR_WIDTH = 0.8
"""Of all bars at one place, which is 1 wide."""
AT_MOST = "\N{LESS-THAN OR EQUAL TO}"
CROSS_DISTANCE = 0.07
"""Between crosses at one place, of the height of a panel."""
OFFERED: dict[str, Any] = {"color": GREY, "linestyle": "--", "linewidth": 1, "zorder": 0}
SHORT_S = 10.0
"""Times below are told in milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One figure over x."""

    metric: str
    label: str
    high: str = ""
    """A metric that is drawn thin beside it."""
    is_time: bool = False
    factor: float = 1.0
    top: float | None = None
    """End of the axis; None = by the values."""


TOKENS = Panel(metric=TOKENS_PER_S, label="output tokens/s")
TOKENS_PER_DEVICE = Panel(metric=TOKENS_PER_S_PER_DEVICE, label="output tokens/s\nper device")
TTFT = Panel(metric="ttft_s.p50", label="TTFT", high="ttft_s.p99", is_time=True)
TPOT = Panel(metric="tpot_s.p50", label="TPOT", high="tpot_s.p99", is_time=True)
GOOD = Panel(metric=GOODPUT, label="good requests/s")
GOOD_PER_DEVICE = Panel(metric=GOODPUT_PER_DEVICE, label="good requests/s\nper device")
ATTAINED = Panel(metric=SLO_ATTAINMENT, label="good requests, %", factor=100.0, top=100.0)
PANELS = (TOKENS, TOKENS_PER_DEVICE, TTFT, TPOT)
GOOD_PANELS = (GOOD, GOOD_PER_DEVICE, ATTAINED)


def draw_pictures(
    cells: Sequence[Outcome],
    axes: Sequence[Axis],
    *,
    objective: str,
    limits: Mapping[str, float],
    folder: Path,
) -> list[Path]:
    """Write the pictures that the cells have figures for; returns them in order."""
    panels = [*PANELS]
    if objective not in [panel.metric for panel in (*PANELS, *GOOD_PANELS)]:
        panels.append(Panel(metric=objective, label=objective))
    pictures = [
        (THROUGHPUT_LATENCY, partial(plot_panels, cells, axes, panels, "Throughput and latency")),
        (PARETO, partial(plot_pareto, cells, axes)),
    ]
    if limits:
        title = f"Goodput\n{limits_text(limits, AT_MOST)}"
        pictures.append((GOODPUT_OVER_AXES, partial(plot_panels, cells, axes, GOOD_PANELS, title)))
        pictures.append((OTHER_LIMITS, partial(plot_scales, cells, axes, limits)))
    for name in PICTURES:
        (folder / name).unlink(missing_ok=True)  # of an earlier summary
    # A value that holds two dollar signs is no formula.
    with rc_context({"text.parse_math": False}):
        return [folder / name for name, draw in pictures if draw(folder / name)]


def plot_panels(
    cells: Sequence[Outcome], axes: Sequence[Axis], panels: Sequence[Panel], title: str, path: Path
) -> bool:
    """Draw panels below each other over the axes; False where there is nothing to draw."""
    plan = plan_of(cells, axes)
    has_devices = any(cell.num_devices > 1 for cell in cells)
    shown = [
        panel
        for panel in panels
        if any(cell.number_of(panel.metric) is not None for cell in cells)
        and (has_devices or not panel.metric.endswith("_per_device"))
    ]
    if plan is None or not shown:
        return False
    num_columns = len(plan.columns)
    figure = new_figure(3.4 + 4.2 * num_columns, 1.1 + 2.2 * len(shown))
    grid = figure.subplots(len(shown), num_columns, sharex="col", sharey="row", squeeze=False)
    for row, panel in zip(grid, shown, strict=True):
        factor, unit = _unit(cells, panel)
        for position, (axes_of, column) in enumerate(zip(row, plan.columns, strict=True)):
            _draw(axes_of, column, plan, panel, factor)
            axes_of.grid(alpha=0.3, axis="both" if column.x.is_numeric else "y")
            axes_of.set_axisbelow(True)
            if position == 0:
                axes_of.set_ylabel(f"{panel.label}{unit}")
                _scale_y(axes_of, cells, panel, factor, plan)
    for axes_of, column in zip(grid[-1], plan.columns, strict=True):
        label_x(axes_of, column)
    for axes_of, column in zip(grid[0], plan.columns, strict=True):
        axes_of.set_title(column.title, fontsize="medium")
    figure.suptitle(title, fontsize="medium" if "\n" in title else "large")
    is_bars = not any(column.x.is_numeric for column in plan.columns)
    series_legend(figure, plan, _keys(cells, shown, plan), is_bars=is_bars)
    save(figure, path)
    return True


def plot_scales(
    cells: Sequence[Outcome], axes: Sequence[Axis], limits: Mapping[str, float], path: Path
) -> bool:
    """Draw the share of good requests if all limits were tighter or looser.

    Of many cells those with the best goodput are drawn; False where no requests are known.
    """
    known = sorted(
        (cell for cell in cells if cell.requests),
        key=lambda cell: cell.number_of(GOODPUT) or 0.0,
        reverse=True,
    )
    if not known:
        return False
    figure = new_figure(8.5, 4.5)
    panel = figure.subplots()
    for index, cell in enumerate(known[:MAX_CURVES]):
        shares = [attainment(cell.requests, limits, scale=scale) or 0.0 for scale in SCALES]
        style = line_style(index) | {"markevery": (index, 8), "markersize": 5}
        panel.plot(
            SCALES,
            [100 * share for share in shares],
            **style,
            label=in_lines(cell_label(cell, axes)),
        )
    panel.axvline(1.0, color=GREY, linewidth=1, zorder=0)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(FuncFormatter(number_text))
    panel.set_xlim(SCALES[0], SCALES[-1])
    panel.set_ylim(-2, 100 * 1.03)
    panel.set_xlabel(f"factor on every limit of {limits_text(limits, AT_MOST)}")
    panel.set_ylabel("good requests, %")
    panel.grid(alpha=0.3)
    figure.suptitle("Good requests, were the limits other ones")
    if axes:
        title = ", ".join(axis.name for axis in axes)
        if len(known) > MAX_CURVES:
            title += f"\n(the best {MAX_CURVES} of {len(known)})"
        figure.legend(title=title, loc="outside right upper", frameon=False, alignment="left")
    save(figure, path)
    return True


def _unit(cells: Sequence[Outcome], panel: Panel) -> tuple[float, str]:
    """Factor and unit of a time."""
    if not panel.is_time:
        return panel.factor, ""
    longest = max(_values(cells, panel), default=0.0)
    return (1e3, ", ms") if longest < SHORT_S else (1.0, ", s")


def _values(cells: Sequence[Outcome], panel: Panel) -> list[float]:
    names = (panel.metric, panel.high) if panel.high else (panel.metric,)
    values = (cell.number_of(name) for cell in cells for name in names)
    return [value for value in values if value is not None]


def _scale_y(axes: Axes, cells: Sequence[Outcome], panel: Panel, factor: float, plan: Plan) -> None:
    """From zero, or logarithmic where times differ much."""
    values = [value * factor for value in _values(cells, panel)]
    is_bars = not any(column.x.is_numeric for column in plan.columns)
    if panel.is_time and not is_bars and 0 < LATENCY_RATIO * min(values) < max(values):
        log_scale(axes)
        axes.set_ylim(min(values) / 1.6, max(values) * 1.3)
        return
    axes.yaxis.set_major_formatter(FuncFormatter(number_text))
    if panel is GOOD:  # something of what was offered is seen
        sent = [cell.number_of(OFFERED_RATE) for cell in cells]
        values.append(min((rate for rate in sent if rate is not None), default=0.0))
    axes.set_ylim(0, (panel.top or max(values) or 1.0) * HEADROOM)


def _draw(axes: Axes, column: PlotColumn, plan: Plan, panel: Panel, factor: float) -> None:
    """All series of one panel, and crosses on the axis where a cell has no result."""
    labels, num_missing = plan.labels, Counter[float]()
    if panel is GOOD and column.x.key == RATE:
        _draw_offered(axes, column)
    for index, label in enumerate(labels):
        cells = [cell for cell in column.cells if plan.series[cell.number] == label]
        width = 0.0 if column.x.is_numeric else BAR_WIDTH / len(labels)
        shift = (index - (len(labels) - 1) / 2) * width
        places = sorted((column.position(cell) + shift, cell.number, cell) for cell in cells)
        middle = _points(places, panel.metric, factor)
        high = _points(places, panel.high, factor) if panel.high else []
        if column.x.is_numeric:
            _draw_lines(axes, middle, high, index, has_lines=plan.has_lines)
        else:
            _draw_bars(axes, middle, high, index, width * 0.9)
        for x in (x for x, _, cell in places if not cell.is_ok):
            height = CROSS_DISTANCE * num_missing[x]
            num_missing[x] += 1
            style = CROSS | {"color": colour_of(index), "clip_on": False, "zorder": 4}
            axes.plot([x], [height], **style, transform=axes.get_xaxis_transform())


def _draw_offered(axes: Axes, column: PlotColumn) -> None:
    """Where a service would be that keeps the limits of every request, by what was sent."""
    sent: dict[float, list[float]] = {}
    for cell in column.cells:
        value = cell.number_of(OFFERED_RATE)
        if value is not None:
            sent.setdefault(column.position(cell), []).append(value)
    if sent:
        rates = sorted(sent)
        axes.plot(rates, [max(sent[rate]) for rate in rates], **OFFERED)
        return
    low, high = float(column.x.values[0]), float(column.x.values[-1])
    rates = [low + (high - low) * step / 100 for step in range(101)]
    axes.plot(rates, rates, **OFFERED)


def _points(
    places: Sequence[tuple[float, int, Outcome]], metric: str, factor: float
) -> list[tuple[float, float]]:
    """Not a number where a cell has no result, so that a line has a gap there."""
    values = ((x, cell.number_of(metric)) for x, _, cell in places)
    return [(x, math.nan if value is None else value * factor) for x, value in values]


def _draw_lines(
    axes: Axes,
    middle: Sequence[tuple[float, float]],
    high: Sequence[tuple[float, float]],
    index: int,
    *,
    has_lines: bool,
) -> None:
    style = line_style(index) if has_lines else line_style(index) | {"linestyle": "none"}
    axes.plot([x for x, _ in middle], [y for _, y in middle], **style)
    thin = style | THIN
    if has_lines:
        thin["linestyle"] = ":"
    axes.plot([x for x, _ in high], [y for _, y in high], **thin)


def _draw_bars(
    axes: Axes,
    middle: Sequence[tuple[float, float]],
    high: Sequence[tuple[float, float]],
    index: int,
    width: float,
) -> None:
    """A bar to the middle, and a thin line on to the high figure."""
    tops = dict(high)
    axes.bar([x for x, _ in middle], [y for _, y in middle], width, color=colour_of(index))
    for x, low in middle:
        if not math.isnan(tops.get(x, math.nan)):
            axes.plot([x, x], [low, tops[x]], color=GREY, linewidth=1.2)
            axes.plot([x], [tops[x]], marker="_", color=GREY, markersize=8)


def _keys(cells: Sequence[Outcome], panels: Sequence[Panel], plan: Plan) -> list[Line2D]:
    """Handles of what is no series."""
    keys = []
    if any(panel.high for panel in panels):
        if any(column.x.is_numeric for column in plan.columns):
            mark: dict[str, Any] = {"color": GREY, "marker": "o"}
            dots, solid = (":", "-") if plan.has_lines else ("none", "none")
            keys.append(Line2D([], [], label="p50", **mark | {"linestyle": solid}))
            keys.append(Line2D([], [], label="p99", **mark | THIN | {"linestyle": dots}))
        else:
            keys.append(Line2D([], [], color=GREY, marker="_", label="bar: p50, line: up to p99"))
    if GOOD in panels and any(column.x.key == RATE for column in plan.columns):
        keys.append(Line2D([], [], **OFFERED, label="offered (as sent)"))
    if any(not cell.is_ok for cell in cells):
        keys.append(Line2D([], [], **CROSS, label="no result"))
    return keys
