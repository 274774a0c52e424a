"""How pictures of sweeps look: colours, ticks, legends. Imports matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from inferkit.sweep.plot_plan import Plan, PlotColumn, in_lines

# Distinguishable for the colour-blind (Okabe and Ito), and by shape in black and white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.")
GREY = "#777777"
CROSS: dict[str, Any] = {
    "linestyle": "none",
    "marker": "x",
    "color": GREY,
    "markersize": 7,
    "markeredgewidth": 2,
}
"""Where a cell has no result."""
THIN: dict[str, Any] = {"linewidth": 1.0, "markersize": 4, "markerfacecolor": "white"}
"""A figure that stands beside another one."""
DPI = 120
MAX_TICKS = 9
MAX_TICK_LEN = 72
"""Characters of all texts below an axis; longer ones are turned."""


def new_figure(width: float, height: float) -> Figure:
    """Of so many inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=DPI)


def colour_of(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def line_style(index: int) -> dict[str, Any]:
    """Of the line with this number: colour and marker, dashes where colours repeat."""
    return {
        "color": colour_of(index),
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
    }


def number_text(value: float, _: object = None) -> str:
    """`0.25`, `1200`, `25k`, `1.2M`."""
    for size, letter in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e6 if letter == "M" else 1e3
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def label_x(axes: Axes, column: PlotColumn) -> None:
    """Ticks at the values of the axis, and its name."""
    axes.set_xlabel(column.x.key)
    if not column.x.is_numeric:
        values = [in_lines(value) for value in column.x.values]
        lengths = [max(map(len, value.splitlines() or [""])) for value in values]
        turned: dict[str, Any] = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"}
        is_crowded = max(lengths) * len(values) > MAX_TICK_LEN
        axes.set_xticks(range(len(values)), values, **turned if is_crowded else {})
        axes.set_xlim(-0.6, len(values) - 0.4)
        return
    numbers = [float(value) for value in column.x.values]
    if column.is_log:
        axes.set_xscale("log", base=2)
    if len(numbers) <= MAX_TICKS:
        axes.xaxis.set_major_locator(FixedLocator(numbers))
    elif column.is_log:
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=MAX_TICKS))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(MAX_TICKS, integer=_are_whole(numbers)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(number_text))


def log_scale(axes: Axes, which: str = "y") -> None:
    """A logarithmic axis with few, plain numbers."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(number_text))


def series_legend(
    figure: Figure,
    plan: Plan,
    others: Sequence[Line2D],
    *,
    is_bars: bool = False,
    has_lines: bool = True,
) -> None:
    """What colours and marks mean, beside the panels, where nothing is hidden."""
    labels = [label for label in plan.labels if label]
    handles = []
    for index, label in enumerate(labels):
        style = line_style(index)
        if is_bars:
            style |= {"linestyle": "none", "marker": "s", "markersize": 10}
        elif not (plan.has_lines and has_lines):
            style["linestyle"] = "none"
        handles.append(Line2D([], [], label=in_lines(label), **style))
    if handles:
        figure.legend(
            handles=handles,
            title=plan.series_title,
            loc="outside right upper",
            frameon=False,
            alignment="left",
        )
    if others:
        figure.legend(
            handles=list(others), loc="outside lower center", ncols=len(others), frameon=False
        )


def _are_whole(numbers: Sequence[float]) -> bool:
    return all(number.is_integer() for number in numbers)
