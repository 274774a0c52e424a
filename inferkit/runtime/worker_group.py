"""Starts the ranks of a run on this node and watches them until they have ended.

Ranks are forked from a fork server that has imported what they run, so that sixteen of them start
as fast as one; torch.distributed.elastic supervises them. Each reports over a pipe of its own, and
what it prints goes into files of the run directory. What a rank does is `rank_process`.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from inferkit.core.errors import WorkerError
from inferkit.runtime.rank_process import PEER_GRACE_S, run_rank

logger = logging.getLogger(__name__)

START_METHOD = "forkserver"
ELASTIC = "torch.distributed.elastic.multiprocessing"
"""Whose code runs in a rank before its own does."""
POLL_INTERVAL_S = 0.1
END_GRACE_S = 5.0
"""How long a rank that has reported its error may take to exit before the run ends without it."""
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""For which elastic installs handlers of its own while workers run."""
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
    handlers = {signum: signal.getsignal(signum) for signum in END_SIGNALS}
    known = set(multiprocessing.active_children())
    # Both import torch, for seconds: the fork server begins before this process does.
    start_fork_server(ELASTIC, entrypoint.partition(":")[0])
    from torch.distributed.elastic.multiprocessing import SignalException

    try:
        _supervise(entrypoint, rank_args, log_dir=log_dir, on_event=on_event)
    except SignalException as error:
        # elastic turns signals into this exception; a user expects Ctrl-C to be one.
        if error.sigval is signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    finally:
        # A signal may come before elastic knows the ranks that are started already.
        for child in set(multiprocessing.active_children()) - known:
            child.kill()
            child.join()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _supervise(
    entrypoint: str,
    rank_args: Mapping[int, tuple[Any, ...]],
    *,
    log_dir: Path,
    on_event: OnEvent,
) -> None:
    from torch.distributed.elastic.multiprocessing import start_processes

    from inferkit.runtime.elastic_logs import RankFiles

    # elastic logs a failure as a page of its own traceback; the rank's error is told below.
    for noisy in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    log_dir.mkdir(parents=True, exist_ok=True)
    ranks = list(rank_args)
    pipes = {rank: multiprocessing.Pipe(duplex=False) for rank in ranks}
    senders = {rank: sender for rank, (_, sender) in pipes.items()}
    inbox = _Inbox({rank: receiver for rank, (receiver, _) in pipes.items()}, on_event)
    processes = None
    try:
        processes = start_processes(
            name="worker",
            entrypoint=run_rank,
            args={
                local_rank: (rank, entrypoint, rank_args[rank], senders, frozenset(os.environ))
                for local_rank, rank in enumerate(ranks)
            },
            envs={local_rank: dict(os.environ) for local_rank in range(len(ranks))},
            logs_specs=RankFiles(log_dir, ranks),
            start_method=START_METHOD,
        )
        for sender in senders.values():
            sender.close()
        result = None
        while result is None and not inbox.is_overdue():
            inbox.wait(POLL_INTERVAL_S)
            result = processes.wait(timeout=0)
        inbox.wait(0)
    finally:
        if processes is not None:
            processes.close(signal.SIGKILL if inbox.is_overdue() else None)
        inbox.close()
    dead = {}
    if result is not None and result.is_failed():
        dead = {ranks[local]: failure.exitcode for local, failure in result.failures.items()}
    error = _cause_of_end(inbox.errors, dead, is_alone=ranks == [0], log_dir=log_dir)
    if error is not None:
        raise error


class _Inbox:
    """Receives what the ranks send; keeps their errors in order of arrival."""

    def __init__(self, receivers: dict[int, Connection], on_event: OnEvent) -> None:
        self.receivers = receivers
        self.on_event = on_event
        self.errors: dict[int, dict[str, Any]] = {}
        self._deadline_s = float("inf")

    def wait(self, timeout_s: float) -> None:
        """Wait for messages and handle all that are there; a rank's pipe ends with it."""
        if not self.receivers:
            time.sleep(timeout_s)
        by_receiver = {receiver: rank for rank, receiver in self.receivers.items()}
        for receiver in connection.wait(list(by_receiver), timeout_s):
            assert isinstance(receiver, Connection), "only pipes are waited for"
            self._drain(by_receiver[receiver], receiver)

    def _drain(self, rank: int, receiver: Connection) -> None:
        try:
            while receiver.poll():
                event = receiver.recv()
                if event["event"] == "error":
                    self._keep(rank, event)
                else:
                    self.on_event(event)
        except (EOFError, OSError):
            del self.receivers[rank]

    def _keep(self, rank: int, error: dict[str, Any]) -> None:
        self.errors[rank] = error
        grace_s = END_GRACE_S + (PEER_GRACE_S if error["is_peer_loss"] else 0.0)
        self._deadline_s = min(self._deadline_s, time.monotonic() + grace_s)

    def is_overdue(self) -> bool:
        """Whether a rank has failed and does not exit."""
        return time.monotonic() > self._deadline_s

    def close(self) -> None:
        for receiver in self.receivers.values():
            receiver.close()


def start_fork_server(*modules: str) -> None:
    """Start the process that ranks are forked from, unless there is one; returns at once.

    It imports `modules` by this process's import path, ends with this process and its ranks, and
    does not hear Ctrl-C.
    """
    forkserver.set_forkserver_preload(list(modules))
    with _blocked(signal.SIGINT), _import_path_for_children():
        forkserver.ensure_running()


@contextlib.contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """Processes that are started meanwhile have these signals blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _import_path_for_children() -> Iterator[None]:
    """Processes that are started meanwhile import from where this one does.

    A fork server would look in the working directory first, whatever lies there. A rank gets the
    variables of this process again before it begins.
    """
    paths = [os.path.abspath(path) for path in sys.path]
    changed = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def let_threads_sleep() -> None:
    """Give child processes `THREAD_SPIN_COUNT` unless the user chose; torch reads it on load."""
    os.environ.setdefault("GOMP_SPINCOUNT", THREAD_SPIN_COUNT)


def _cause_of_end(
    errors: Mapping[int, dict[str, Any]],
    dead: Mapping[int, int],
    *,
    is_alone: bool,
    log_dir: Path,
) -> WorkerError | None:
    """What to tell of a run whose ranks reported `errors` or ended with `dead` exit codes.

    A rank that ended without a word comes first (the others can only have noticed it), then the
    first that failed by itself, then those that lost another rank.
    """
    for rank, exitcode in dead.items():
        if rank not in errors:
            return WorkerError(
                f"rank {rank} ended without a result: {_how_it_ended(exitcode)}; "
                f"its output is under {log_dir}"
            )
    for is_peer_loss in (False, True):
        for rank, event in errors.items():
            if event["is_peer_loss"] is is_peer_loss:
                return _worker_error(rank, event, is_alone=is_alone, log_dir=log_dir)
    return None


def _worker_error(
    rank: int, event: dict[str, Any], *, is_alone: bool, log_dir: Path
) -> WorkerError:
    if event["is_peer_loss"]:
        detail = event["message"].splitlines()[0]
        return WorkerError(
            f"rank {rank} lost the connection to another rank, which has ended or cannot be "
            f"reached; if that is on another node, the terminal there tells why ({detail}; "
            f"the output of this node's ranks is under {log_dir})"
        )
    prefix = "" if is_alone else f"rank {rank}: "
    if event["is_user_error"]:
        return WorkerError(f"{prefix}{event['message']}")
    return WorkerError(f"{prefix}{event['type']}: {event['message']}\n{event['traceback']}")


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    hint = " (out of memory?)" if -exitcode == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
