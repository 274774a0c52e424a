"""The table of a sweep's cells: which columns it has, and how it fits a terminal."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferkit.config.sweep_rules import (
    GOODPUT,
    GOODPUT_PER_DEVICE,
    SLO_ATTAINMENT,
    TOKENS_PER_S,
    TOKENS_PER_S_PER_DEVICE,
)
from inferkit.offline.summary import shorten
from inferkit.sweep.cells import OK
from inferkit.sweep.outcomes import NEVER_RUN, Axis, Outcome, values_of

MAX_VALUE_LEN = 40
"""Characters of a swept value; longer ones lose their end."""
WHOLE_WIDTH = 1000
BEST, BAD = "bold green", "red"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A metric that the table shows."""

    title: str
    """Two lines where it is long."""
    metric: str
    factor: float = 1.0
    weight: int
    """On a narrow terminal the columns of least weight are left out first."""

    def text(self, cell: Outcome) -> str:
        value = cell.number_of(self.metric)
        return "" if value is None else number_text(value * self.factor)


FIGURES = (
    Figure(title="tokens/s", metric=TOKENS_PER_S, weight=9),
    Figure(title="tokens/s\nper device", metric=TOKENS_PER_S_PER_DEVICE, weight=5),
    Figure(title="TTFT\np50 ms", metric="ttft_s.p50", factor=1e3, weight=8),
    Figure(title="TTFT\np99 ms", metric="ttft_s.p99", factor=1e3, weight=3),
    Figure(title="TPOT\np50 ms", metric="tpot_s.p50", factor=1e3, weight=8),
    Figure(title="TPOT\np99 ms", metric="tpot_s.p99", factor=1e3, weight=3),
    Figure(title="good\nreq/s", metric=GOODPUT, weight=9),
    Figure(title="good req/s\nper device", metric=GOODPUT_PER_DEVICE, weight=6),
    Figure(title="good\n%", metric=SLO_ATTAINMENT, factor=100.0, weight=4),
)
NEVER_LEFT_OUT = 10


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column with its texts, one per cell."""

    title: str
    texts: tuple[str, ...]
    values: tuple[float | str | None, ...]
    """What it is sorted by."""
    is_number: bool = False
    weight: int = NEVER_LEFT_OUT
    is_axis: bool = False

    @property
    def is_equal(self) -> bool:
        """All cells of several have the same, of what is no axis."""
        return not self.is_axis and len(self.texts) > 1 and len(set(self.texts)) == 1


def table_columns(
    cells: Sequence[Outcome], axes: Iterable[Axis], objective: str, best: Outcome | None
) -> list[Column]:
    """Cell, what it varied, how it ended, its figures, the seconds that it took."""
    names = [f"#{cell.number}{' *' if cell is best else ''}" for cell in cells]
    columns = [Column(title="cell", texts=tuple(names), values=tuple(c.number for c in cells))]
    given = [values_of(cell.overrides) for cell in cells]
    for axis in axes:
        values = [axis.value_in(overrides) for overrides in given]
        columns.append(
            Column(
                title=axis.name,
                texts=tuple(shorten(value, MAX_VALUE_LEN) for value in values),
                values=tuple(map(float, values)) if axis.is_numeric else tuple(values),
                is_number=axis.is_numeric,
                is_axis=True,
            )
        )
    statuses = tuple(cell.status for cell in cells)
    columns.append(Column(title="status", texts=statuses, values=statuses))
    columns += [_figure(figure, cells, objective) for figure in _shown(cells, objective)]
    return [*columns, _seconds(cells)]


def split_equal(columns: Iterable[Column]) -> tuple[list[Column], dict[str, str]]:
    """Columns that tell cells apart, and title -> text of the others; without empty ones."""
    varying, shared = [], {}
    for column in columns:
        if not column.is_equal:
            varying.append(column)
        elif column.texts[0] and column.texts[0] != OK:
            shared[column.title.replace("\n", " ")] = column.texts[0]
    return varying, shared


def print_table(
    columns: Sequence[Column], style_of_row: Callable[[int], str], console: Console
) -> None:
    """Print what fits the terminal; in a file every line is whole."""
    columns = list(columns)
    num_columns = len(columns)
    table = _table(columns, style_of_row)
    if not console.is_terminal:
        console.width = max(console.width, _width(table, console))
    while _width(table, console) > console.width:
        weakest = min(columns, key=lambda column: column.weight)
        if weakest.weight == NEVER_LEFT_OUT:
            break
        columns = [column for column in columns if column is not weakest]
        table = _table(columns, style_of_row)
    console.print(table)
    if len(columns) < num_columns:
        text = (
            f"{num_columns - len(columns)} columns do not fit this terminal (summary.csv has all)"
        )
        console.print(Text(text, style="dim"), soft_wrap=True)


def number_text(value: float) -> str:
    """Three significant digits, and no fewer than the integer part has."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _shown(cells: Sequence[Outcome], objective: str) -> list[Figure]:
    """Figures that a cell has, the objective among them."""
    has_devices = any(cell.num_devices > 1 for cell in cells)
    figures = list(FIGURES)
    if objective not in [figure.metric for figure in FIGURES]:
        figures.append(Figure(title=objective, metric=objective, weight=9))
    return [
        figure
        for figure in figures
        if any(cell.number_of(figure.metric) is not None for cell in cells)
        and (has_devices or not figure.metric.endswith("_per_device"))
    ]


def _figure(figure: Figure, cells: Sequence[Outcome], objective: str) -> Column:
    return Column(
        title=figure.title,
        texts=tuple(figure.text(cell) for cell in cells),
        values=tuple(cell.number_of(figure.metric) for cell in cells),
        is_number=True,
        weight=NEVER_LEFT_OUT - 1 if figure.metric == objective else figure.weight,
    )


def _seconds(cells: Sequence[Outcome]) -> Column:
    ran = [cell.status not in NEVER_RUN for cell in cells]
    return Column(
        title="seconds",
        texts=tuple(f"{c.seconds:.1f}" if did else "" for c, did in zip(cells, ran, strict=True)),
        values=tuple(c.seconds if did else None for c, did in zip(cells, ran, strict=True)),
        is_number=True,
        weight=1,
    )


def _table(columns: Iterable[Column], style_of_row: Callable[[int], str]) -> Table:
    table = Table()
    for column in columns:
        # What carries no weight may be folded, a figure never.
        table.add_column(
            column.title,
            justify="right" if column.is_number else "left",
            no_wrap=column.weight < NEVER_LEFT_OUT,
        )
    for row, texts in enumerate(zip(*(column.texts for column in columns), strict=True)):
        table.add_row(*map(Text, texts), style=style_of_row(row))
    return table


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(width=WHOLE_WIDTH)).maximum
