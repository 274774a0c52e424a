"""What a report shows of a sweep: its cells, its pictures, and the configuration of the best."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferkit.config.provenance import PROVENANCE_FILE, RESOLVED_FILE
from inferkit.config.space import ConfigSpace
from inferkit.inspect.recorded import read_json, run_snapshot
from inferkit.inspect.report.page import (
    Failure,
    Field,
    Page,
    Picture,
    Table,
    TableRow,
    Tile,
    Title,
    link_to,
)
from inferkit.inspect.report.run import (
    choices,
    derived_rows,
    nodes,
    notes,
    provenance_rows,
    run_title,
    when_text,
)
from inferkit.sweep.cells import RESULT_FILE, cells_text
from inferkit.sweep.goodput import limits_text
from inferkit.sweep.outcomes import Outcome, read_sweep
from inferkit.sweep.summary import Summary
from inferkit.sweep.table import Column, number_text, split_equal

TEXTS = {
    "throughput_latency.png": "Throughput and latency over what was swept",
    "pareto.png": "Throughput against time per output token; the front has the cells that no "
    "other beats in both",
    "goodput.png": "Requests that keep the limits of sweep.slo, over what was swept",
    "slo_scale.png": "Requests that would be good if the limits were tighter or looser",
}


def sweep_page(summary: Summary, space: ConfigSpace, output: Path) -> Page:
    """The report of a sweep.

    Args:
        output: where the page will be, from which its links lead to the folders of cells.
    """
    record = read_sweep(summary.sweep_dir)
    page = Page(
        title=f"sweep of {cells_text(len(summary.cells))}",
        status=_status(summary),
        is_ok=summary.num_failed == 0,
        facts=_facts(summary, record),
        command=str(record.get("command") or ""),
        tiles=_tiles(summary),
        errors=[_failure(cell, summary) for cell in summary.cells if not cell.is_ok],
        table=_table(summary, output),
        pictures=[Picture(path=path, text=TEXTS[path.name]) for path in summary.pictures],
    )
    cell = _shown_cell(summary)
    if cell is None:
        return page
    snapshot = run_snapshot(cell.run_dir, space)
    model = run_title(snapshot).partition(":")[0]
    is_best = cell is summary.best
    whose = f"Of cell #{cell.number}{', the best' if is_best else ''}"
    if summary.axes:
        keys = ", ".join(axis.key for axis in summary.axes)
        whose += f" ({summary.label(cell)}). The others differ in {keys}"
    return replace(
        page,
        title=f"{model}: {page.title}",
        notes=notes(snapshot),
        configuration_of=f"{whose}, and in what follows from that." if summary.axes else whose,
        choices=choices(snapshot),
        nodes=nodes(snapshot),
        derived=derived_rows(snapshot),
        provenance=list(provenance_rows(read_json(cell.run_dir / PROVENANCE_FILE))),
    )


def _shown_cell(summary: Summary) -> Outcome | None:
    """Whose configuration stands for all: the best cell's, else that of one that was started."""
    started = [cell for cell in summary.cells if (cell.run_dir / RESOLVED_FILE).is_file()]
    if summary.best in started:
        return summary.best
    return started[0] if started else None


def _status(summary: Summary) -> str:
    num_bad = len(summary.cells) - summary.num_ok
    num_cells = cells_text(len(summary.cells))
    return "all cells ok" if not num_bad else f"{summary.num_ok} of {num_cells} ok"


def _facts(summary: Summary, record: Mapping[str, Any]) -> list[str]:
    facts = []
    if record.get("started_at"):
        facts.append(f"started {when_text(record['started_at'])}")
        ended = record.get("ended_at")
        facts.append(f"ended {when_text(ended)}" if ended else "not at its end yet, or killed")
    seconds = sum(cell.seconds for cell in summary.cells)
    return [*facts, f"{number_text(seconds)} s in cells", str(summary.sweep_dir)]


def _tiles(summary: Summary) -> list[Tile]:
    tiles = [Tile(label="cells ok", value=f"{summary.num_ok} of {len(summary.cells)}")]
    if summary.num_failed:
        tiles.append(Tile(label="not ended well", value=str(summary.num_failed)))
    if summary.num_invalid:
        tiles.append(Tile(label="invalid, not run", value=str(summary.num_invalid)))
    best = summary.best
    if best is not None:
        value = number_text(best.number_of(summary.objective) or 0.0)
        tiles.append(Tile(label=f"best {summary.objective}, cell #{best.number}", value=value))
    return tiles


def _failure(cell: Outcome, summary: Summary) -> Failure:
    label = f" [{summary.label(cell)}]" if summary.axes else ""
    traceback = read_json(cell.run_dir / RESULT_FILE).get("traceback")
    return Failure(
        title=f"#{cell.number} {cell.status}{label}",
        text=cell.error,
        traceback=str(traceback or ""),
    )


def _table(summary: Summary, output: Path) -> Table:
    columns, shared = split_equal(summary.columns)
    best = summary.best
    texts = []
    if shared:
        figures = ", ".join(f"{title} {text}" for title, text in shared.items())
        texts.append(f"All cells: {figures}.")
    if summary.limits:
        texts.append(f"A request is good with {limits_text(summary.limits)}.")
    return Table(
        titles=tuple(Title(text=one.title, is_number=one.is_number) for one in columns),
        rows=tuple(
            TableRow(
                cells=tuple(_field(column, row, cell, output) for column in columns),
                kind="best" if cell is best else "" if cell.is_ok else "bad",
            )
            for row, cell in enumerate(summary.cells)
        ),
        text=" ".join(texts),
        best=""
        if best is None
        else f"best by {summary.objective}: #{best.number}"
        + (f" with {summary.label(best)}" if summary.axes else ""),
    )


def _field(column: Column, row: int, cell: Outcome, output: Path) -> Field:
    value = column.values[row]
    is_name = column.title == "cell"
    has_folder = is_name and cell.run_dir.is_dir()
    return Field(
        text=column.texts[row],
        value="" if value is None else str(value),
        is_number=column.is_number,
        link=f"{link_to(cell.run_dir, output)}/" if has_folder else "",
    )


@contextmanager
def with_pictures(summary: Summary) -> Iterator[Summary]:
    """The summary with the pictures of the sweep's folder, or such as are drawn for the report."""
    there = [summary.sweep_dir / name for name in TEXTS]
    found = tuple(path for path in there if path.is_file())
    if found:
        yield replace(summary, pictures=found)
        return
    with tempfile.TemporaryDirectory(prefix="inferkit-report-") as folder:
        yield summary.drawn(Path(folder))
