"""Which axis of a sweep goes where in a picture. Knows no matplotlib."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inferkit.sweep.outcomes import Axis, Outcome, values_of

RATE = "load.rate"
LOAD_AXES = (RATE, "load.concurrency")
"""They are what everything else is looked at over, where they are swept."""
MAX_COLUMNS = 4
LOG_RATIO = 8.0
"""An axis of numbers is logarithmic where the largest is this many times the smallest,"""
STEP_RATIO = 2.0
"""and the last step is this many times the first: 1, 2, 4, 8, and not 1, 2, 3, ... 8."""
MAX_LINE_LEN = 24
"""Characters; longer values are broken into lines between words."""
SEPARATOR = ", "


@dataclass(frozen=True, kw_only=True)
class PlotColumn:
    """Panels below each other that share their x."""

    x: Axis
    title: str
    """`block_size=128`; empty where there is one column."""
    cells: tuple[Outcome, ...]

    def position(self, cell: Outcome) -> float:
        """Of a cell on x: the number itself, or the place of the text in the axis."""
        value = self.x.value_in(values_of(cell.overrides))
        return float(value) if self.x.is_numeric else float(self.x.values.index(value))

    @property
    def is_log(self) -> bool:
        if not self.x.is_numeric:
            return False
        numbers = [float(value) for value in self.x.values]
        if numbers[0] <= 0 or numbers[-1] < LOG_RATIO * numbers[0]:
            return False
        return numbers[-1] - numbers[-2] >= STEP_RATIO * (numbers[1] - numbers[0])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the cells of a sweep are laid out."""

    columns: tuple[PlotColumn, ...]
    series: Mapping[int, str]
    """Cell number -> what its line is called; empty texts where there is one line."""
    series_title: str
    """Names of the axes that lines differ in."""
    has_lines: bool
    """Cells that form a grid are joined by lines; those that a search has drawn are not."""

    @property
    def labels(self) -> list[str]:
        """Of all lines, in order."""
        return list(dict.fromkeys(self.series.values()))


def plan_of(cells: Sequence[Outcome], axes: Sequence[Axis]) -> Plan | None:
    """None where nothing varies.

    A grid has the axis with most numbers on x; of three axes or more the one with the fewest
    values makes columns; the others make lines. A search has a column for each axis.
    """
    if not axes:
        return None
    if len(cells) != math.prod(len(axis.values) for axis in axes):
        columns = tuple(PlotColumn(x=x, title="", cells=tuple(cells)) for x in axes[:MAX_COLUMNS])
        nameless = {cell.number: "" for cell in cells}
        return Plan(columns=columns, series=nameless, series_title="", has_lines=False)
    x = _main_axis(axes)
    others = [axis for axis in axes if axis is not x]
    facet = _facet(others)
    in_line = [axis for axis in others if axis is not facet]
    return Plan(
        columns=_columns(cells, x, facet),
        series={cell.number: cell_label(cell, in_line) for cell in _in_order(cells, in_line)},
        series_title=SEPARATOR.join(axis.name for axis in in_line),
        has_lines=x.is_numeric,
    )


def cell_label(cell: Outcome, axes: Iterable[Axis]) -> str:
    """The values of a cell: `8, tp2`."""
    values = values_of(cell.overrides)
    return SEPARATOR.join(axis.value_in(values) for axis in axes)


def in_lines(text: str) -> str:
    """A long value, such as the overrides of one side of a cluster, in short lines."""
    return textwrap.fill(text, MAX_LINE_LEN, break_on_hyphens=False)


def _main_axis(axes: Sequence[Axis]) -> Axis:
    for key in LOAD_AXES:
        for axis in axes:
            if axis.key == key and axis.is_numeric:
                return axis
    return max(axes, key=lambda axis: (axis.is_numeric, len(axis.values)))


def _facet(others: Sequence[Axis]) -> Axis | None:
    if len(others) < 2:
        return None
    fewest = min(others, key=lambda axis: len(axis.values))
    return fewest if len(fewest.values) <= MAX_COLUMNS else None


def _columns(cells: Sequence[Outcome], x: Axis, facet: Axis | None) -> tuple[PlotColumn, ...]:
    if facet is None:
        return (PlotColumn(x=x, title="", cells=tuple(cells)),)
    return tuple(
        PlotColumn(
            x=x,
            title=f"{facet.key}={value}",
            cells=tuple(c for c in cells if facet.value_in(values_of(c.overrides)) == value),
        )
        for value in facet.values
    )


def _in_order(cells: Sequence[Outcome], axes: Sequence[Axis]) -> list[Outcome]:
    """By the values of the axes, so that lines are listed 1, 2, 4, ..."""

    def places(cell: Outcome) -> list[int]:
        values = values_of(cell.overrides)
        return [axis.values.index(axis.value_in(values)) for axis in axes]

    return sorted(cells, key=places)
