"""What every rank process does around its own work: report errors, end when its run has ended."""

import logging
import multiprocessing
import os
import pkgutil
import signal
import threading
import time
from collections.abc import Mapping
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from inferkit.runtime.logs import hidden_output
from inferkit.runtime.rank_errors import PEER_GRACE_S, error_event, is_peer_loss
from inferkit.runtime.rank_output import Writers, write_to

logger = logging.getLogger(__name__)

OWN_VARIABLES = frozenset({"TORCHELASTIC_ERROR_FILE"})


def run_rank(
    rank: int,
    entrypoint: str,
    args: tuple[Any, ...],
    senders: Mapping[int, Connection],
    outputs: Writers,
    variables: frozenset[str],
) -> None:
    """Main function of a forked rank: its error goes to the parent before the process exits.

    Args:
        entrypoint: "package.module:function", called with `args` and `channel`.
        senders: of all ranks of this node; every process gets all of them and keeps its own.
        outputs: where the ranks print to.
        variables: names of the parent's environment variables.
    """
    _end_with_the_run()
    for name in os.environ.keys() - variables - OWN_VARIABLES:
        del os.environ[name]
    for other, sender in senders.items():
        if other != rank:
            sender.close()
    write_to(outputs, rank)
    channel = senders[rank]
    try:
        with hidden_output():  # it goes into files of the run directory
            pkgutil.resolve_name(entrypoint)(*args, channel=channel)
    except Exception as error:
        logger.error("this rank failed", exc_info=error)
        channel.send(error_event(error))
        if is_peer_loss(error):
            time.sleep(PEER_GRACE_S)
        raise SystemExit(1) from None


def _end_with_the_run() -> None:
    """End this process when the one that started the run, or the fork server, is no more.

    An interrupt is the parent's business, which ends its ranks. torch has the system send SIGINT
    when the fork server dies; until now it was blocked.
    """
    fork_server = os.getppid()

    def on_interrupt(signum: int, frame: object) -> None:
        if os.getppid() != fork_server:
            os._exit(128 + signum)

    signal.signal(signal.SIGINT, on_interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by another process"
    sentinel = parent.sentinel

    def exit_after_parent() -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=exit_after_parent, name="parent watch", daemon=True).start()
