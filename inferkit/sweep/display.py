"""What a sweep tells while it runs, on stderr: a line for every cell, on a terminal also bars."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from inferkit.config.faults import Cell, varying_overrides
from inferkit.sweep.cells import INTERRUPTED, LOG_FILE, OK, JobResult, cells_text
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
        self._console = console
        self._progress = progress
        listed = [Cell(number=cell.number, overrides=cell.overrides) for cell in cells]
        self._varying = varying_overrides(listed)
        self._seconds: list[float] = []
        self._num_bad = 0
        self._begin_s = 0.0
        """When the cell that runs has begun; 0 = none does."""
        self._name = ""
        self._now = ""
        self._sweep = progress.add_task("sweep", total=num_due, status=self._sweep_text)
        self._cell = progress.add_task("", total=None, status=self._cell_text, visible=False)

    def tell(self, text: str, *, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def begin(self, cell: PlannedCell) -> None:
        """A cell starts."""
        name = " ".join(self._varying[cell.number])
        if not self._console.is_terminal:
            self.tell(f"inferkit: cell #{cell.number} starts: {name}")
        self._begin_s = time.monotonic()
        self._name, self._now = name[:MAX_OVERRIDES_LEN], ""
        self._progress.reset(
            self._cell, total=None, visible=True, description=f"cell #{cell.number}"
        )

    def show(self, values: Mapping[str, Any]) -> None:
        """What the cell that runs tells of itself."""
        self._now = ": ".join(text for text in (values["stage"], values["status"]) if text)
        self._progress.update(self._cell, completed=values["completed"], total=values["total"])

    def end(self, cell: PlannedCell, result: JobResult) -> None:
        """A cell has ended."""
        self._begin_s = 0.0
        self._seconds.append(result.seconds)
        self._num_bad += result.status != OK
        text = f"inferkit: cell #{cell.number} {result.status} after {result.seconds:.1f} s"
        if result.status != OK:
            text += f": {result.error}; see {cell.folder / LOG_FILE}"
        left = self._left_text() if result.status != INTERRUPTED else ""
        self.tell(text + (f"; {left}" if left else ""), style="" if result.status == OK else "red")
        self._progress.update(self._cell, visible=False)
        self._progress.update(self._sweep, completed=len(self._seconds))

    def _cell_text(self) -> str:
        return f"{self._name}  {self._now}"

    def _sweep_text(self) -> str:
        parts = [f"{len(self._seconds)} of {cells_text(self.num_due)}"]
        parts += [f"{self._num_bad} failed"] if self._num_bad else []
        return ", ".join(part for part in (*parts, self._left_text()) if part)

    def _left_text(self) -> str:
        """An estimate by the cells that have run; empty where it has no ground."""
        num_left = self.num_due - len(self._seconds)
        if not self._seconds or not num_left:
            return ""
        mean_s = sum(self._seconds) / len(self._seconds)
        running_s = time.monotonic() - self._begin_s if self._begin_s else 0.0
        left_s = mean_s * num_left - min(running_s, mean_s)
        return f"about {duration_text(left_s)} left"


class _Status(ProgressColumn):
    """What a task says of itself at the moment, cut to the width that is left."""

    def __init__(self) -> None:
        super().__init__(Column(ratio=1, no_wrap=True, overflow="ellipsis"))

    def render(self, task: Task) -> Text:
        return Text(task.fields["status"]())


@contextmanager
def sweep_display(
    cells: Sequence[PlannedCell], num_due: int, *, console: Console | None = None
) -> Iterator[SweepDisplay]:
    console = console or Console(stderr=True, highlight=False)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        _Status(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        expand=True,
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
