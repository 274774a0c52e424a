"""Starts the worker processes of a run and watches them until they have ended.

Workers are fresh (spawned) processes, supervised by torch.distributed.elastic. They report over a
pipe of their own; what they print goes into files of the run directory.
"""

import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from inferkit.core.errors import InferkitError, WorkerError

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""For which elastic installs handlers of its own while workers run."""
THREAD_SPIN_COUNT = "1000"
"""How often a waiting OpenMP thread looks before it sleeps. The default of libgomp spins for
milliseconds: beside another process that computes, both then take up to a hundred times as long."""

Entrypoint = Callable[..., None]
OnEvent = Callable[[dict[str, Any]], None]


def run_workers(
    entrypoint: Entrypoint, rank_args: list[tuple[Any, ...]], *, log_dir: Path, on_event: OnEvent
) -> None:
    """Run `entrypoint(*rank_args[rank], channel)` once per rank and wait for all of them.

    Args:
        entrypoint: a module-level function, best wrapped by `reporting`.
        log_dir: gets stdout and stderr of every rank.
        on_event: called in this process with each event that a worker sends.

    Raises:
        WorkerError: a worker failed or died; the others are ended. The message is the worker's.
    """
    from torch.distributed.elastic.multiprocessing import SignalException, start_processes

    from inferkit.runtime.elastic_logs import RankFiles

    # elastic logs a failure as a page of its own traceback; the worker's error is told below.
    for noisy in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    log_dir.mkdir(parents=True, exist_ok=True)
    let_threads_sleep()
    handlers = {signum: signal.getsignal(signum) for signum in END_SIGNALS}
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    processes = start_processes(
        name="worker",
        entrypoint=entrypoint,
        args={rank: (*args, sender) for rank, args in enumerate(rank_args)},
        envs={rank: {} for rank in range(len(rank_args))},
        logs_specs=RankFiles(log_dir),
        start_method="spawn",
    )
    sender.close()
    failures: list[dict[str, Any]] = []

    def drain() -> None:
        try:
            while receiver.poll():
                event = receiver.recv()
                if event["event"] == "error":
                    failures.append(event)
                else:
                    on_event(event)
        except EOFError:
            return

    try:
        while True:
            receiver.poll(POLL_INTERVAL_S)
            drain()
            result = processes.wait(timeout=0)
            if result is not None:
                drain()
                break
    except SignalException as error:
        # elastic turns signals into this exception; a user expects Ctrl-C to be one.
        if error.sigval is signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    finally:
        processes.close()
        receiver.close()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    if failures:
        raise _worker_error(failures[0], log_dir)
    if result.is_failed():
        rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
        raise WorkerError(
            f"rank {rank} ended without a result: {_cause(failure.exitcode)}; "
            f"its output is under {log_dir}"
        )


def let_threads_sleep() -> None:
    """Give child processes `THREAD_SPIN_COUNT` unless the user chose; torch reads it on load."""
    os.environ.setdefault("GOMP_SPINCOUNT", THREAD_SPIN_COUNT)


def reporting(entrypoint: Callable[..., None], *args: Any, channel: Connection) -> None:
    """Run a worker's main function; its error goes to the parent before the process exits.

    An interrupt is the parent's business, which ends its workers; one without a parent ends at
    once (torch has the system send SIGINT when a worker's parent dies).
    """
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        entrypoint(*args, channel=channel)
    except Exception as error:
        logger.exception("the worker failed")
        channel.send(
            {
                "event": "error",
                "message": str(error) or type(error).__name__,
                "type": type(error).__name__,
                "is_user_error": isinstance(error, InferkitError),
                "traceback": traceback.format_exc(),
            }
        )
        raise SystemExit(1) from None


def _on_interrupt(signum: int, frame: object) -> None:
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        os._exit(128 + signum)


def _worker_error(event: dict[str, Any], log_dir: Path) -> WorkerError:
    if event["is_user_error"]:
        return WorkerError(event["message"])
    return WorkerError(f"{event['type']}: {event['message']}\n{event['traceback']}")


def _cause(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    hint = " (out of memory?)" if -exitcode == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
