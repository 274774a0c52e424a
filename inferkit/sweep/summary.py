"""The end of a sweep: which cell did best and which did not end well, as a table, a file of all
figures, and pictures.
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferkit.config.provenance import write_text
from inferkit.config.sweep_rules import (
    GOODPUT,
    GOODPUT_PER_DEVICE,
    SLO_ATTAINMENT,
    TOKENS_PER_S,
    TOKENS_PER_S_PER_DEVICE,
    is_higher_better,
)
from inferkit.offline.summary import PatientConsole, shorten
from inferkit.sweep.cells import OK
from inferkit.sweep.outcomes import (
    Axis,
    Outcome,
    find_axes,
    limits_of,
    read_outcomes,
    read_sweep,
    values_of,
)

SUMMARY_FILE = "summary.csv"
INVALID = "invalid"
"""Status of a cell whose configuration has faults; with sweep.skip_invalid it is not run."""
MAX_TITLE_VALUE_LEN = 40
"""Characters; longer values that all cells share lose their end in the title."""
MIN_WIDTH = 80
BEST, BAD = "bold green", "red"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A figure in the table."""

    title: str
    metric: str
    factor: float = 1.0

    def text(self, cell: Outcome) -> str:
        value = cell.number_of(self.metric)
        return "" if value is None else number_text(value * self.factor)


COLUMNS = (
    Column(title="tokens/s", metric=TOKENS_PER_S),
    Column(title="tokens/s per device", metric=TOKENS_PER_S_PER_DEVICE),
    Column(title="TTFT ms p50", metric="ttft_s.p50", factor=1e3),
    Column(title="p99", metric="ttft_s.p99", factor=1e3),
    Column(title="TPOT ms p50", metric="tpot_s.p50", factor=1e3),
    Column(title="p99", metric="tpot_s.p99", factor=1e3),
    Column(title="good req/s", metric=GOODPUT),
    Column(title="good req/s per device", metric=GOODPUT_PER_DEVICE),
    Column(title="good %", metric=SLO_ATTAINMENT, factor=100.0),
)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a sweep has come to."""

    sweep_dir: Path
    cells: tuple[Outcome, ...]
    axes: tuple[Axis, ...]
    objective: str
    """Name of the metric by which the best cell is chosen."""
    limits: Mapping[str, float]
    """Of a good request, in seconds; empty without sweep.slo."""
    pictures: tuple[Path, ...] = ()
    note: str = ""
    """Why there is no picture."""

    @property
    def num_ok(self) -> int:
        return sum(cell.is_ok for cell in self.cells)

    @property
    def num_invalid(self) -> int:
        """Cells that were not run, for their configuration has faults."""
        return sum(cell.status == INVALID for cell in self.cells)

    @property
    def num_failed(self) -> int:
        """Cells that were to run and did not end well, whatever the reason."""
        return len(self.cells) - self.num_ok - self.num_invalid

    @property
    def best(self) -> Outcome | None:
        """The cell with the best objective; the first of equals. None where no cell has it."""
        sign = 1.0 if is_higher_better(self.objective) else -1.0
        known = [cell for cell in self.cells if cell.number_of(self.objective) is not None]
        return max(
            known, key=lambda cell: sign * (cell.number_of(self.objective) or 0.0), default=None
        )

    def label(self, cell: Outcome) -> str:
        """What the cell has of its own: `scheduler.batch_size=8 parallel=tp2`."""
        values = values_of(cell.overrides)
        return " ".join(f"{axis.key}={axis.value_in(values)}" for axis in self.axes)

    def print(self, console: Console | None = None) -> None:
        """Show the table, what did not end well, the best cell, and where the files are."""
        print_summary(self, console)


def summarise(sweep_dir: Path) -> Summary:
    """Read the results of all cells, and write summary.csv and the pictures into `sweep_dir`."""
    cells = read_outcomes(sweep_dir)
    config = next((cell.config for cell in cells if cell.config), {})
    node = read_sweep(sweep_dir).get("sweep") or config.get("sweep") or {}
    limits = limits_of(node)
    objective = node.get("objective") or (GOODPUT if limits else TOKENS_PER_S)
    summary = Summary(
        sweep_dir=sweep_dir,
        cells=tuple(cells),
        axes=tuple(find_axes(cells)),
        objective=objective,
        limits=limits,
    )
    write_text(sweep_dir / SUMMARY_FILE, csv_text(summary))
    return summary


def csv_text(summary: Summary) -> str:
    """One row per cell: what it varied, how it ended, and all its metrics."""
    metrics = dict.fromkeys(name for cell in summary.cells for name in cell.metrics)
    keys = [axis.key for axis in summary.axes]
    names = ["cell", *keys, "status", "seconds", "error", *(n for n in metrics if n not in keys)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for cell in summary.cells:
        given = values_of(cell.overrides)
        swept = {axis.key: axis.value_in(given) for axis in summary.axes}
        facts = {"cell": cell.number, "status": cell.status, "seconds": round(cell.seconds, 3)}
        writer.writerow(dict(cell.metrics) | facts | {"error": cell.error} | swept)
    return text.getvalue()


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """See `Summary.print`."""
    console = console or PatientConsole()
    table, shared = _table(summary)
    if not console.is_terminal:
        # Nobody's screen is too narrow: a table in a file keeps its lines whole.
        needed = console.measure(table, options=console.options.update(width=1000)).maximum
        console.width = max(console.width, needed)
    for line in _heading(summary, shared):
        console.print(line, soft_wrap=True)
    console.print(table)
    for line in _lines(summary):
        # Wrapped at no width: a path that is cut into lines cannot be copied.
        console.print(line, soft_wrap=True)


def _table(summary: Summary) -> tuple[Table, list[str]]:
    """One row per cell; beside it what is the same in all rows."""
    cells, best = summary.cells, summary.best
    columns: list[tuple[str, list[str], bool]] = [
        ("cell", [_cell_name(cell, is_best=cell is best) for cell in cells], False)
    ]
    for axis in summary.axes:
        values = [shorten(axis.value_in(values_of(cell.overrides)), 40) for cell in cells]
        columns.append((axis.name, values, axis.is_numeric))
    columns.append(("status", [cell.status for cell in cells], False))
    for column in _shown_columns(summary):
        columns.append((column.title, [column.text(cell) for cell in cells], True))
    columns.append(("seconds", [f"{cell.seconds:.1f}" for cell in cells], True))
    shared, varying = [], []
    for title, texts, is_right in columns:
        is_equal = len(cells) > 1 and len(set(texts)) == 1
        if is_equal and texts[0]:
            shared.append(f"{title} {texts[0]}")
        elif not is_equal:
            varying.append((title, texts, is_right))
    table = Table()
    for title, _, is_right in varying:
        table.add_column(title, justify="right" if is_right else "left")
    for row, cell in enumerate(cells):
        style = BEST if cell is best else "" if cell.is_ok else BAD
        table.add_row(*(Text(texts[row]) for _, texts, _ in varying), style=style)
    return table, shared


def _shown_columns(summary: Summary) -> list[Column]:
    """Those that a cell has, and the objective."""
    has_devices = any(cell.num_devices > 1 for cell in summary.cells)
    shown = [
        column
        for column in COLUMNS
        if any(cell.number_of(column.metric) is not None for cell in summary.cells)
        and (has_devices or not column.metric.endswith("_per_device"))
    ]
    if summary.objective not in [column.metric for column in COLUMNS]:
        shown.append(Column(title=summary.objective, metric=summary.objective))
    return shown


def _cell_name(cell: Outcome, *, is_best: bool) -> str:
    return f"#{cell.number}{' *' if is_best else ''}"


def _heading(summary: Summary, shared: Sequence[str]) -> list[Text]:
    """The overrides and figures that all cells have in common."""
    num_cells = len(summary.cells)
    lines = [Text(f"sweep of {num_cells} {'cell' if num_cells == 1 else 'cells'}", style="bold")]
    common = [
        f"{key}={shorten(value, MAX_TITLE_VALUE_LEN)}" for key, value in _common(summary).items()
    ]
    if common:
        lines.append(Text("with " + " ".join(common)))
    if shared:
        lines.append(Text("all cells: " + ", ".join(shared)))
    return lines


def _common(summary: Summary) -> dict[str, str]:
    swept = {axis.key for axis in summary.axes}
    values = values_of(summary.cells[0].overrides) if summary.cells else {}
    return {key: value for key, value in values.items() if key not in swept}


def _lines(summary: Summary) -> list[Text]:
    """Below the table."""
    lines = []
    bad = [cell for cell in summary.cells if not cell.is_ok]
    for cell in bad:
        text = f"#{cell.number} {cell.status}"
        if summary.axes:
            text += f" [{summary.label(cell)}]"
        lines.append(Text(f"{text}: {cell.error}" if cell.error else text, style=BAD))
    best = summary.best
    if best is not None:
        value = number_text(best.number_of(summary.objective) or 0.0)
        text = f"* best by {summary.objective}: #{best.number} with {value}"
        lines.append(Text(f"{text} [{summary.label(best)}]" if summary.axes else text, style=BEST))
    lines.append(Text(_counts(summary), style=BAD if summary.num_failed else ""))
    if summary.note:
        lines.append(Text(summary.note))
    files = [SUMMARY_FILE, *(path.name for path in summary.pictures)]
    lines.append(Text(f"sweep directory: {summary.sweep_dir} ({', '.join(files)})"))
    return lines


def _counts(summary: Summary) -> str:
    """`9 of 12 cells are ok; 2 failed, 1 timeout`."""
    counts = Counter(cell.status for cell in summary.cells if not cell.is_ok)
    num_invalid = counts.pop(INVALID, 0)
    text = f"{summary.num_ok} of {len(summary.cells)} cells ended {OK}"
    others = [f"{num} {status}" for status, num in counts.items()]
    if num_invalid:
        others.append(f"{num_invalid} not run, for their configuration has faults")
    return "; ".join([text, *([", ".join(others)] if others else [])])


def number_text(value: float) -> str:
    """Three significant digits, and no fewer than the integer part has."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
