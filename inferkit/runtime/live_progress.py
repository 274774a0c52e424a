"""How far a run is: a bar on the terminal and, where a sweep has started it, a file for the sweep.

Torch-free.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from inferkit.config.provenance import write_json

PROGRESS_FILE = "_INFERKIT_PROGRESS_FILE"
"""Variable that names the file: {stage, completed, total, status}. No setting of a user's."""
FILE_INTERVAL_S = 0.5
"""It is written so often at most; a new stage is written at once."""


class LiveProgress:
    """One bar at a time: a stage, how much of it is done, and what happens just now."""

    def __init__(self, progress: Progress, file: Path | None) -> None:
        self._progress = progress
        self._file = file
        self._written_s = 0.0
        self._task = progress.add_task("starting", total=None, status="")

    def begin(self, stage: str, *, total: float | None = None) -> None:
        """Begin a stage; one with a total has a bar and a time of its own."""
        if total is not None:
            self._progress.reset(self._task, total=total)
        self._progress.update(self._task, description=stage, status="")
        self._tell(is_new=True)

    def update(self, completed: float, *, total: float | None = None, status: str = "") -> None:
        """Args:
        total: of the stage, where it has become known only now.
        """
        self._progress.update(self._task, completed=completed, total=total, status=status)
        self._tell()

    def _tell(self, *, is_new: bool = False) -> None:
        now_s = time.monotonic()
        if self._file is None or not (is_new or now_s > self._written_s + FILE_INTERVAL_S):
            return
        self._written_s = now_s
        (task,) = self._progress.tasks
        values = {"stage": task.description, "completed": task.completed, "total": task.total}
        write_json(self._file, values | {"status": task.fields["status"]})


@contextlib.contextmanager
def live_progress() -> Iterator[LiveProgress]:
    """Show progress on stderr meanwhile."""
    file = os.environ.get(PROGRESS_FILE)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        yield LiveProgress(progress, Path(file) if file else None)
