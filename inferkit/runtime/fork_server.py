"""The process that ranks are forked from: it has imported what they run."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker, util

from inferkit.runtime import fork_server_end

OWN_SESSION = "inferkit.runtime.own_session"
"""Not imported here: to import it is what it does."""


def start_fork_server(*modules: str) -> None:
    """Start the process that ranks are forked from, unless there is one; returns at once.

    It imports `modules` by this process's import path, ends with this process and its ranks, and
    does not hear what is sent to the process group of this one, such as Ctrl-C.
    """
    forkserver.set_forkserver_preload([OWN_SESSION, *modules, fork_server_end.__name__])
    resource_tracker.ensure_running()  # would unblock the interrupt below
    with _blocked(signal.SIGINT), _variables_for_fork_server():
        forkserver.ensure_running()


def kill_fork_server() -> None:
    """Kill it wherever it is, also while it imports; may be called from a signal handler.

    Who waits for a rank from it gets an EOFError or OSError.
    """
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stop_fork_server() -> None:
    """Kill it and forget it: the next start has a new one."""
    kill_fork_server()
    with contextlib.suppress(OSError):
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """Processes that are started meanwhile have these signals blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _variables_for_fork_server() -> Iterator[None]:
    """Environment of a process that is started meanwhile.

    It would look for modules in the working directory first, whatever lies there. Ranks get the
    variables of this process again before they begin.
    """
    changed = {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        "PYTHONSAFEPATH": "1",
        fork_server_end.FOLDER: util.get_temp_dir(),
        # No fork survives what a device's library opens; a rank's platform loads it.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
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
