"""The process that ranks are forked from: it has imported what they run."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker


def start_fork_server(*modules: str) -> None:
    """Start the process that ranks are forked from, unless there is one; returns at once.

    It imports `modules` by this process's import path, ends with this process and its ranks, and
    does not hear Ctrl-C.
    """
    forkserver.set_forkserver_preload(list(modules))
    resource_tracker.ensure_running()  # would unblock the interrupt below
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
