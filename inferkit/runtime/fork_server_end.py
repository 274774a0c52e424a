"""Imported by the fork server alone: when it ends by itself, it removes the folder of its socket.

So does the process that made the folder, unless it is killed.
"""

import atexit
import contextlib
import os
from pathlib import Path

FOLDER = "INFERKIT_FORK_SERVER_FOLDER"


def remove_folder(folder: Path, pid: int) -> None:
    """Remove the sockets and, where it holds nothing else, the folder; in the process `pid`."""
    if os.getpid() != pid:
        return
    with contextlib.suppress(OSError):
        for listener in folder.glob("listener-*"):
            listener.unlink()
        folder.rmdir()


if FOLDER in os.environ:
    atexit.register(remove_folder, Path(os.environ[FOLDER]), os.getpid())
