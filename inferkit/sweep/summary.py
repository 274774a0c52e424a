"""The end of a sweep: which cell did best and which did not end well, as a table, a file of all
figures, and pictures.
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from inferkit.config.provenance import write_text
from inferkit.config.sweep_rules import (
    GOODPUT,
    GOODPUT_PER_DEVICE,
    TOKENS_PER_S,
    is_higher_better,
)
from inferkit.offline.summary import PatientConsole, shorten
from inferkit.sweep.cells import INVALID, OK, cells_text
from inferkit.sweep.goodput import limits_text
from inferkit.sweep.outcomes import (
    NEVER_RUN,
    Axis,
    Outcome,
    find_axes,
    limits_of,
    read_outcomes,
    read_sweep,
    values_of,
)
from inferkit.sweep.table import (
    BAD,
    BEST,
    Column,
    number_text,
    print_table,
    split_equal,
    table_columns,
)

SUMMARY_FILE = "summary.csv"
NO_PICTURES = "no pictures: install the extra inferkit[plots]"
MAX_TITLE_VALUE_LEN = 40
"""Characters; longer values that all cells share lose their end in the title."""


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

    @property
    def columns(self) -> list[Column]:
        """Of the table, those that are the same in all rows included."""
        return table_columns(self.cells, self.axes, self.objective, self.best)

    def drawn(self, folder: Path) -> "Summary":
        """With the pictures that it writes into `folder`, or a note why there are none."""
        try:
            from inferkit.sweep.plots import draw_pictures
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":
                raise
            return replace(self, note=NO_PICTURES)
        varying = [axis for axis in self.axes if len(axis.values) > 1]
        pictures = draw_pictures(
            self.cells, varying, objective=self.objective, limits=self.limits, folder=folder
        )
        return replace(self, pictures=tuple(pictures))

    def print(self, console: Console | None = None) -> None:
        """Show the table, what did not end well, the best cell, and where the files are."""
        print_summary(self, console)


def read_summary(sweep_dir: Path) -> Summary:
    """What the folder of a sweep tells; nothing is written.

    Raises:
        OSError, ValueError: its sweep.json cannot be read.
    """
    cells = read_outcomes(sweep_dir)
    config = next((cell.config for cell in cells if cell.config), {})
    record = read_sweep(sweep_dir)
    node = record.get("sweep") or config.get("sweep") or {}
    limits = limits_of(node)
    default = GOODPUT if limits else TOKENS_PER_S
    # A search has one objective from its first trial on, which knows nothing of the others.
    if limits and not record.get("axes") and len({c.num_devices for c in cells if c.is_ok}) > 1:
        default = GOODPUT_PER_DEVICE
    return Summary(
        sweep_dir=sweep_dir,
        cells=tuple(cells),
        axes=tuple(find_axes(cells, record.get("axes", ()))),
        objective=node.get("objective") or default,
        limits=limits,
    )


def summarise(sweep_dir: Path) -> Summary:
    """Read the results of all cells, and write summary.csv and the pictures into `sweep_dir`."""
    summary = read_summary(sweep_dir)
    write_text(sweep_dir / SUMMARY_FILE, csv_text(summary))
    return summary.drawn(sweep_dir)


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
        seconds = "" if cell.status in NEVER_RUN else round(cell.seconds, 3)
        facts = {"cell": cell.number, "status": cell.status, "seconds": seconds}
        writer.writerow(dict(cell.metrics) | facts | {"error": cell.error} | swept)
    return text.getvalue()


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """See `Summary.print`."""
    console = console or PatientConsole()
    columns, shared = split_equal(summary.columns)

    def style_of_row(row: int) -> str:
        cell = summary.cells[row]
        return BEST if cell is summary.best else "" if cell.is_ok else BAD

    for line in _heading(summary, shared):
        console.print(line, soft_wrap=True)
    if summary.cells:
        print_table(columns, style_of_row, console)
    for line in _lines(summary):
        # Wrapped at no width: a path that is cut into lines cannot be copied.
        console.print(line, soft_wrap=True)


def _heading(summary: Summary, shared: Mapping[str, str]) -> list[Text]:
    """The overrides and figures that all cells have in common."""
    lines = [Text(f"sweep of {cells_text(len(summary.cells))}", style="bold")]
    common = [
        f"{key}={shorten(value, MAX_TITLE_VALUE_LEN)}" for key, value in _common(summary).items()
    ]
    if common:
        lines.append(Text("with " + " ".join(common)))
    if summary.limits:
        lines.append(Text(f"a request is good with {limits_text(summary.limits)}"))
    if shared:
        figures = [f"{title} {text}" for title, text in shared.items()]
        lines.append(Text("all cells: " + ", ".join(figures)))
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
    """`9 of 12 cells ended ok; 2 failed, 1 timeout`."""
    counts = Counter(cell.status for cell in summary.cells if not cell.is_ok)
    num_invalid = counts.pop(INVALID, 0)
    text = f"{summary.num_ok} of {cells_text(len(summary.cells))} ended {OK}"
    others = [f"{num} {status}" for status, num in counts.items()]
    if num_invalid:
        others.append(f"{num_invalid} {INVALID} (not run)")
    return "; ".join([text, *([", ".join(others)] if others else [])])
