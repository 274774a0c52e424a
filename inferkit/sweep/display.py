"""What a sweep tells while it runs, on stderr: a line for every cell, on a terminal also bars."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from inferkit.config.faults import Cell, varying_overrides
from inferkit.sweep.cell_run import LOG_FILE
from inferkit.sweep.cells import OK, JobResult
from inferkit.sweep.plan import PlannedCell

MAX_OVERRIDES_LEN = 60
"""Characters of a cell's overrides in a bar; lines have all of them."""


class SweepDisplay:
    """Args:
    cells: all of the grid.
    num_due: how many of them are to be run.
    """

    def __init__(
        self, cells: Sequence[PlannedCell], num_due: int, *, console: Console, progress: Progress
    ) -> None:
        self.num_due = num_due
        self._all = len(cells)
        self._console = console
        self._progress = progress
        listed = [Cell(number=cell.number, overrides=cell.overrides) for cell in cells]
        self._varying = varying_overrides(listed)
        self._seconds: list[float] = []
        self._num_bad = 0
        self._sweep = progress.add_task("sweep", total=num_due, status="")
        self._cell = progress.add_task("", total=None, status="", visible=False)

    def tell(self, text: str, *, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def begin(self, cell: PlannedCell) -> None:
        """A cell starts."""
        name = " ".join(self._varying[cell.number])
        if not self._console.is_terminal:
            self.tell(f"inferkit: cell #{cell.number} starts: {name}")
        self._name = name[:MAX_OVERRIDES_LEN]
        self._progress.reset(
            self._cell,
            total=None,
            visible=True,
            description=f"cell #{cell.number}",
            status=self._name,
        )
        self._show_rest()

    def show(self, values: Mapping[str, Any]) -> None:
        """What the cell that runs tells of itself."""
        status = ": ".join(text for text in (values["stage"], values["status"]) if text)
        self._progress.update(
            self._cell,
            completed=values["completed"],
            total=values["total"],
            status=f"{self._name}  {status}",
        )

    def end(self, cell: PlannedCell, result: JobResult) -> None:
        """A cell has ended."""
        self._seconds.append(result.seconds)
        self._num_bad += result.status != OK
        text = f"inferkit: cell #{cell.number} {result.status} after {result.seconds:.1f} s"
        if result.status != OK:
            text += f": {result.error}; see {cell.folder / LOG_FILE}"
        left = self._left_text()
        self.tell(text + (f"; {left}" if left else ""), style="" if result.status == OK else "red")
        self._progress.update(self._cell, visible=False)
        self._progress.update(self._sweep, completed=len(self._seconds))
        self._show_rest()

    def _show_rest(self) -> None:
        failed = f"{self._num_bad} failed" if self._num_bad else ""
        text = ", ".join(part for part in (failed, self._left_text()) if part)
        self._progress.update(self._sweep, status=text)

    def _left_text(self) -> str:
        """An estimate by the cells that have run; empty where it has no ground."""
        num_left = self.num_due - len(self._seconds)
        if not self._seconds or not num_left:
            return ""
        mean_s = sum(self._seconds) / len(self._seconds)
        return f"about {duration_text(mean_s * num_left)} left"


@contextmanager
def sweep_display(
    cells: Sequence[PlannedCell], num_due: int, *, console: Console | None = None
) -> Iterator[SweepDisplay]:
    console = console or Console(stderr=True, highlight=False)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        yield SweepDisplay(cells, num_due, console=console, progress=progress)


def duration_text(seconds: float) -> str:
    """`3725` -> `1 h 2 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
