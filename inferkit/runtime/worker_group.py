"""Starts the ranks of a run on this node and watches them until they have ended.

Ranks are forked from a fork server that has imported what they run, so that sixteen of them start
as fast as one; torch.distributed.elastic supervises them. Each reports over a pipe of its own, and
what it prints goes into files of the run directory. What a rank does is `rank_process`.
"""

import atexit
import contextlib
import importlib
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from inferkit.runtime.fork_server import kill_fork_server, start_fork_server, stop_fork_server
from inferkit.runtime.rank_errors import PEER_GRACE_S, cause_of_end
from inferkit.runtime.rank_output import RankOutput
from inferkit.runtime.rank_process import run_rank

logger = logging.getLogger(__name__)

START_METHOD = "forkserver"
ELASTIC = "torch.distributed.elastic.multiprocessing"
"""Whose code runs in a rank before its own does."""
POLL_INTERVAL_S = 0.1
END_GRACE_S = 5.0
"""How long a rank that has reported its error may take to exit before the run ends without it."""
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
ELASTIC_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
THREAD_SPIN_COUNT = "1000"
"""How often a waiting OpenMP thread looks before it sleeps. The default of libgomp spins for
milliseconds: beside another process that computes, both then take up to a hundred times as long."""

OnEvent = Callable[[dict[str, Any]], None]


def run_workers(
    entrypoint: str,
    rank_args: Mapping[int, tuple[Any, ...]],
    *,
    log_dir: Path,
    on_event: OnEvent,
) -> None:
    """Run `entrypoint(*rank_args[rank], channel=...)` once per rank and wait for all of them.

    Args:
        entrypoint: "package.module:function"; this process does not import it.
        rank_args: ranks of this node -> arguments.
        log_dir: gets stdout and stderr of every rank.
        on_event: called in this process with each event that a rank sends.

    Raises:
        WorkerError: a rank failed or died; the others are ended. Where several fail, the message
            is that of the cause, not of those who lost it.
    """
    let_threads_sleep()
    log_dir.mkdir(parents=True, exist_ok=True)
    ranks = list(rank_args)
    with _end_signals() as signals:
        # Both import torch, for seconds: the fork server begins before this process does.
        start_fork_server(ELASTIC, entrypoint.partition(":")[0])
        group = _WorkerGroup(entrypoint, rank_args, log_dir=log_dir, on_event=on_event)
        try:
            _start(group, signals)
            while not (signals.received or group.has_ended()):
                group.wait(POLL_INTERVAL_S)
        finally:
            group.close()
            if signals.received and not group.has_started:
                stop_fork_server()
    for signum in signals.received:
        if signum is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signum)
    error = cause_of_end(group.errors, group.dead, is_alone=ranks == [0], log_dir=log_dir)
    if error is not None:
        raise error


def _start(group: "_WorkerGroup", signals: "_EndSignals") -> None:
    """Start the ranks, or return at once where a signal asks for the end: imports take seconds."""
    if not _import_elastic(signals):
        return
    try:
        with signals.answered_by(kill_fork_server):
            group.start()
    except (EOFError, OSError):
        if not signals.received:
            raise


def _import_elastic(signals: "_EndSignals") -> bool:
    """Import what starts ranks; False = a signal came before.

    An import that is broken off leaves modules that cannot be imported again, so it goes on in a
    thread, and the process exits without it.
    """
    thread = threading.Thread(target=_try_import, args=(ELASTIC,), daemon=True)
    thread.start()
    while thread.is_alive() and not signals.received:
        thread.join(POLL_INTERVAL_S)
    if signals.received:
        atexit.register(_exit_without, thread, 128 + signals.received[0])
    return not signals.received


def _try_import(name: str) -> None:
    """Import a module in a thread. A failure shows in the main thread, which imports it again, or
    is the process's own end: modules that register what runs at the exit cannot do so any more."""
    with contextlib.suppress(Exception):
        importlib.import_module(name)


def _exit_without(thread: threading.Thread, exit_code: int) -> None:
    """End the process where a thread would be caught by the interpreter's end in foreign code."""
    if not thread.is_alive():
        return
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


class _WorkerGroup:
    """The processes of this node's ranks, under elastic's supervision."""

    def __init__(
        self,
        entrypoint: str,
        rank_args: Mapping[int, tuple[Any, ...]],
        *,
        log_dir: Path,
        on_event: OnEvent,
    ) -> None:
        self.entrypoint = entrypoint
        self.rank_args = rank_args
        self.ranks = list(rank_args)
        self.log_dir = log_dir
        self.on_event = on_event
        self.errors: dict[int, dict[str, Any]] = {}
        """What ranks have reported, in order of arrival."""
        self._receivers: dict[int, Connection] = {}
        self._processes: Any = None
        self._output: RankOutput | None = None
        self._result: Any = None
        self._known_children = set(multiprocessing.active_children())
        self._deadline_s = float("inf")

    def start(self) -> None:
        from torch.distributed.elastic.multiprocessing import start_processes

        from inferkit.runtime.elastic_logs import RankFiles

        # elastic logs a failure as a page of its own traceback; the rank's error is told instead.
        for noisy in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
            logging.getLogger(noisy).setLevel(logging.CRITICAL)
        pipes = {rank: multiprocessing.Pipe(duplex=False) for rank in self.ranks}
        self._receivers = {rank: receiver for rank, (receiver, _) in pipes.items()}
        senders = {rank: sender for rank, (_, sender) in pipes.items()}
        variables = {k: v for k, v in os.environ.items() if k != ELASTIC_SIGNALS}
        self._output = RankOutput(self.log_dir, self.ranks)
        shared = (senders, self._output.writers, frozenset(variables))
        self._processes = start_processes(
            name="worker",
            entrypoint=run_rank,
            args={
                local_rank: (rank, self.entrypoint, self.rank_args[rank], *shared)
                for local_rank, rank in enumerate(self.ranks)
            },
            envs={local_rank: dict(variables) for local_rank in range(len(self.ranks))},
            logs_specs=RankFiles(self.log_dir, self.ranks),
            start_method=START_METHOD,
        )
        for sender in senders.values():
            sender.close()

    def wait(self, timeout_s: float) -> None:
        """Wait for messages, handle all that are there, and see whether a rank has ended."""
        if not self._receivers:
            time.sleep(timeout_s)
        self._receive(timeout_s)
        self._result = self._processes.wait(timeout=0)
        if self._result is not None:
            self._receive(0)

    def has_ended(self) -> bool:
        """Whether all ranks have, or one has failed: also one that does not exit after it."""
        return self._result is not None or time.monotonic() > self._deadline_s

    @property
    def has_started(self) -> bool:
        return self._processes is not None

    @property
    def dead(self) -> dict[int, int]:
        """Rank -> exit code, of the rank that elastic saw fail first."""
        if self._result is None or not self._result.is_failed():
            return {}
        failures = self._result.failures.items()
        return {self.ranks[local_rank]: failure.exitcode for local_rank, failure in failures}

    def close(self) -> None:
        """End what still runs."""
        if self._processes is not None:
            is_overdue = time.monotonic() > self._deadline_s
            self._processes.close(signal.SIGKILL if is_overdue else None)
        # Where a start failed half-way, elastic does not know the ranks.
        for child in set(multiprocessing.active_children()) - self._known_children:
            child.kill()
            child.join()
        for receiver in self._receivers.values():
            receiver.close()
        if self._output is not None:
            self._output.close()

    def _receive(self, timeout_s: float) -> None:
        ranks = {receiver: rank for rank, receiver in self._receivers.items()}
        for receiver in connection.wait(list(ranks), timeout_s):
            assert isinstance(receiver, Connection), "only pipes are waited for"
            for event in self._messages(ranks[receiver], receiver):
                if event["event"] == "error":
                    self._keep(ranks[receiver], event)
                else:
                    self.on_event(event)

    def _messages(self, rank: int, receiver: Connection) -> Iterator[dict[str, Any]]:
        try:
            while receiver.poll():
                yield receiver.recv()
        except (EOFError, OSError):
            del self._receivers[rank]  # a rank's pipe ends with it

    def _keep(self, rank: int, error: dict[str, Any]) -> None:
        self.errors[rank] = error
        grace_s = END_GRACE_S + (PEER_GRACE_S if error["is_peer_loss"] else 0.0)
        self._deadline_s = min(self._deadline_s, time.monotonic() + grace_s)


@dataclass(kw_only=True)
class _EndSignals:
    """Signals that have asked for the end of this process."""

    received: list[signal.Signals] = field(default_factory=list)
    _answer: Callable[[], None] = lambda: None

    def on_signal(self, number: int, frame: object) -> None:
        self.received.append(signal.Signals(number))
        self._answer()

    @contextlib.contextmanager
    def answered_by(self, answer: Callable[[], None]) -> Iterator[None]:
        """Call `answer`, in the main thread, when a signal comes meanwhile or has come before."""
        before, self._answer = self._answer, answer
        try:
            if self.received:
                answer()
            yield
        finally:
            self._answer = before


@contextlib.contextmanager
def _end_signals() -> Iterator[_EndSignals]:
    """Signals that ask for the end of this process are collected, not acted upon.

    elastic would raise them wherever this process is, also where ranks are half started. Signals
    that are ignored (SIGHUP under nohup) stay so.
    """
    signals = _EndSignals()
    before = {}
    known = os.environ.get(ELASTIC_SIGNALS)
    os.environ[ELASTIC_SIGNALS] = ""
    if threading.current_thread() is threading.main_thread():
        for signum in END_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, signals.on_signal)
    try:
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler or signal.SIG_DFL)
        if known is None:
            del os.environ[ELASTIC_SIGNALS]
        else:
            os.environ[ELASTIC_SIGNALS] = known


def let_threads_sleep() -> None:
    """Give child processes `THREAD_SPIN_COUNT` unless the user chose; torch reads it on load."""
    os.environ.setdefault("GOMP_SPINCOUNT", THREAD_SPIN_COUNT)
