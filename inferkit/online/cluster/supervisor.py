"""Keeps the processes of a cluster alive, and ends them in their order.

Everything happens in one loop of the main thread: children end with the thread that started them.
"""

import contextlib
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inferkit.core.errors import WorkerError
from inferkit.online.cluster.child import Child, ChildSpec, describe_exit
from inferkit.online.cluster.restart import RestartPolicy

POLL_INTERVAL_S = 0.1
REFUSED = 2
"""Exit code of a configuration that cannot run: another start would not either."""
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """Args:
    tell: shows a line to the user.
    on_start: called with a child's name, its process id and the number of its life.
    make_policy: restarts of one child.
    drain_limit_s: how long the children of one stage may take to end.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        tell: Callable[[str], None],
        on_start: Callable[[str, int, int], None] = lambda name, pid, life: None,
        make_policy: Callable[[], RestartPolicy] = RestartPolicy,
        drain_limit_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tell = tell
        self.on_start = on_start
        self.drain_limit_s = drain_limit_s
        self.clock = clock
        self.children = [
            Child(spec, policy=make_policy(), on_line=self._teller(spec.name)) for spec in specs
        ]
        self._stages = sorted({spec.stage for spec in specs})
        self._failure: WorkerError | None = None
        self._is_draining = False
        self._deadline_s = 0.0
        self._signals: list[int] = []

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def num_restarts(self) -> dict[str, int]:
        """Child -> how often it was started again."""
        return {child.spec.name: max(0, child.num_lives - 1) for child in self.children}

    def run(self) -> None:
        """Start all children; returns when they have ended after a signal.

        Raises:
            WorkerError: a child was given up; the others have ended too. Holds its last error.
            SystemExit, KeyboardInterrupt: a second signal ended all at once.
        """
        with collected(self._signals):
            try:
                while not self._is_over():
                    self._wait()
                    self._take_ends()
                    self._start_due()
                    self._take_signals()
                    self._go_on_draining()
            finally:
                self._kill_all()
        if self._failure is not None:
            raise self._failure

    def _is_over(self) -> bool:
        return self._is_draining and not any(child.is_running for child in self.children)

    def _wait(self) -> None:
        """Until somebody prints, for a moment at most."""
        speaking = [child for child in self.children if child.is_speaking]
        if not speaking:
            time.sleep(POLL_INTERVAL_S if self._has_started() else 0.0)
            return
        with selectors.DefaultSelector() as selector:
            for child in speaking:
                selector.register(child.pipe, selectors.EVENT_READ, child)
            for key, _ in selector.select(POLL_INTERVAL_S):
                key.data.read()

    def _has_started(self) -> bool:
        return any(child.num_lives for child in self.children)

    def _start_due(self) -> None:
        for child in self.children:
            if child.due_s is not None and not self._is_draining and child.due_s <= self.clock():
                child.start(self.clock())
                self.on_start(child.spec.name, child.pid, child.num_lives)

    def _take_ends(self) -> None:
        for child in self.children:
            code = child.ended()
            if code is None or self._is_draining:
                continue
            name, life_s = child.spec.name, self.clock() - child.started_s
            delay_s = None if code == REFUSED else child.policy.on_death(life_s)
            if delay_s is None:
                self._give_up(child, code)
                continue
            child.due_s = self.clock() + delay_s
            self.tell(
                f"[{name}] ended ({describe_exit(code)}); starts again in {delay_s:g} s: "
                f"{child.last_error().splitlines()[0]}"
            )

    def _give_up(self, child: Child, code: int) -> None:
        name = child.spec.name
        how = "cannot start" if code == REFUSED else "ends again and again"
        self._failure = WorkerError(
            f"{name} {how} ({describe_exit(code)} after {child.num_lives} starts; log "
            f"{child.spec.log}): {child.last_error()}"
        )
        self.tell(f"[{name}] {how}; the cluster ends")
        self._begin_drain()

    def _take_signals(self) -> None:
        if not self._signals:
            return
        if len(self._signals) > (0 if self._failure else 1):
            self._kill_all()
            if self._failure is not None:
                return
            if self._signals[-1] == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + self._signals[-1])
        if not self._is_draining:
            self.tell(
                "inferkit: the cluster ends; requests that run may finish (a second signal ends "
                "them)"
            )
            self._begin_drain()

    def _begin_drain(self) -> None:
        self._is_draining = True
        for child in self.children:
            child.due_s = None
        self._enter_stage()

    def _enter_stage(self) -> None:
        self._deadline_s = self.clock() + self.drain_limit_s
        for child in self._of_stage():
            child.terminate()

    def _of_stage(self) -> list[Child]:
        """Children that are being drained now."""
        if not self._stages:
            return []
        return [c for c in self.children if c.is_running and c.spec.stage == self._stages[0]]

    def _go_on_draining(self) -> None:
        if not self._is_draining:
            return
        late = self._of_stage()
        if late and self.clock() > self._deadline_s:
            names = ", ".join(child.spec.name for child in late)
            self.tell(f"inferkit: {names} did not end within {self.drain_limit_s:g} s")
            for child in late:
                child.kill()
        elif not late and self._stages:
            self._stages.pop(0)
            self._enter_stage()

    def _kill_all(self) -> None:
        for child in self.children:
            if child.is_running:
                child.kill()
        while any(child.is_running for child in self.children):
            for child in self.children:
                child.ended()
            time.sleep(0.01)

    def _teller(self, name: str) -> Callable[[str], None]:
        return lambda text: self.tell(f"[{name}] {text}")


@contextlib.contextmanager
def collected(received: list[int]) -> Iterator[None]:
    """Signals that ask for the end are collected; those that are ignored (nohup) stay so."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda n, frame: received.append(n))
    try:
        yield
    finally:
        for known, handler in before.items():
            signal.signal(known, handler or signal.SIG_DFL)
