"""One cell of a sweep: a fresh process with its own ranks, watched until it has ended."""

import contextlib
import json
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from inferkit.online.cluster.child import Child, ChildSpec, describe_exit
from inferkit.online.cluster.restart import RestartPolicy
from inferkit.runtime.live_progress import PROGRESS_FILE
from inferkit.sweep.cells import (
    FAILED,
    INTERRUPTED,
    LOG_FILE,
    OK,
    RESULT_FILE,
    TIMEOUT,
    JobResult,
    read_result,
)
from inferkit.sweep.plan import PlannedCell

PROGRAM = (sys.executable, "-m", "inferkit")
POLL_INTERVAL_S = 0.1
GRACE_S = 30.0
"""A cell that is told to end gets so long to end its ranks, and a service its requests."""

ENDING = {"stage": "ending", "completed": 0, "total": None, "status": "a second signal kills it"}

OnProgress = Callable[[Mapping[str, Any]], None]


class CellRun:
    """Runs one cell; from the main thread, with which the cell ends.

    Args:
        timeout_s: the cell is ended when it runs longer; None = no limit.
        signals: received by this process, in order: the first ends the cell, a second at once.
        on_progress: gets what the cell tells of its steps.
        node_rank: further nodes than the first have their results apart.
        grace_s: a cell that is told to end is killed after this.
        program: what is started with the words of the cell.
    """

    def __init__(
        self,
        cell: PlannedCell,
        *,
        timeout_s: float | None = None,
        signals: Sequence[int] = (),
        on_progress: OnProgress = lambda values: None,
        node_rank: int = 0,
        grace_s: float = GRACE_S,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.cell = cell
        self.timeout_s = timeout_s
        self.signals = signals
        self.on_progress = on_progress
        self.run_dir = cell.folder / f"node{node_rank}" if node_rank else cell.folder
        self.grace_s = grace_s
        self.program = program
        self._progress_file = self.run_dir / ".progress.json"
        self._told_ns = 0
        self._status = ""
        """TIMEOUT or INTERRUPTED, where this has ended the cell."""
        self._kill_s = float("inf")

    def run(self, *, run_key: str | None = None) -> JobResult:
        """Run the cell to its end; writes result.json."""
        start_s = time.monotonic()
        (self.run_dir / RESULT_FILE).unlink(missing_ok=True)  # of an earlier run, if at all
        child = Child(
            ChildSpec(
                name=f"cell{self.cell.number}",
                command=lambda life: [*self.program, *self.cell.words],
                log=self.run_dir / LOG_FILE,
                variables={PROGRESS_FILE: str(self._progress_file.absolute())},
            ),
            policy=RestartPolicy(),
            on_line=lambda text: None,
        )
        child.start(start_s)
        try:
            while (code := child.ended()) is None:
                self._wait(child)
                self._end_where_due(child, time.monotonic() - start_s)
        finally:
            if child.is_running:
                child.kill()
            self._progress_file.unlink(missing_ok=True)
        result = replace(
            self._outcome(code, child),
            number=self.cell.number,
            overrides=self.cell.overrides,
            seconds=time.monotonic() - start_s,
            run_key=run_key,
        )
        result.write(self.run_dir)
        return result

    def _wait(self, child: Child) -> None:
        """Until it prints, for a moment at most."""
        if not child.is_speaking:
            time.sleep(POLL_INTERVAL_S)
            return
        with selectors.DefaultSelector() as selector:
            selector.register(child.pipe, selectors.EVENT_READ)
            if selector.select(POLL_INTERVAL_S):
                child.read()
        self._take_progress()

    def _take_progress(self) -> None:
        if self._status:
            return
        with contextlib.suppress(FileNotFoundError):
            changed_ns = self._progress_file.stat().st_mtime_ns
            if changed_ns != self._told_ns:
                self._told_ns = changed_ns
                self.on_progress(json.loads(self._progress_file.read_text("utf-8")))

    def _end_where_due(self, child: Child, life_s: float) -> None:
        if not self._status:
            if self.signals:
                self._status = INTERRUPTED
            elif self.timeout_s is not None and life_s > self.timeout_s:
                self._status = TIMEOUT
            if self._status:
                self._kill_s = life_s + self.grace_s
                child.terminate()
                self.on_progress(ENDING)
        elif life_s > self._kill_s or len(self.signals) > 1:
            child.kill()

    def _outcome(self, code: int, child: Child) -> JobResult:
        """How it ended: in its own words where it has any."""
        own = read_result(self.run_dir)
        if own is not None and own.status == OK and code == 0:
            return own
        result = own or JobResult(number=0, overrides=())
        if self._status == TIMEOUT:
            limit = f"sweep.cell_timeout_s={self.timeout_s:g}"
            return replace(result, status=TIMEOUT, error=f"did not end within {limit}")
        if self._status == INTERRUPTED:
            name = signal.Signals(self.signals[0]).name
            return replace(result, status=INTERRUPTED, error=f"ended with the sweep by {name}")
        if own is not None and own.status != OK and code > 0:
            return own
        if code < 0:
            return replace(result, status=FAILED, error=describe_exit(code))
        text = child.last_error()
        error = f"{describe_exit(code)}: {text.splitlines()[0]}"
        return replace(result, status=FAILED, error=error, traceback=text)
