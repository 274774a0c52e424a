"""Runs a command that the system kills when its parent ends, also where that one is killed.

    python with_parent.py PARENT_PID PROGRAM ARGUMENTS...

The request outlives exec, and the command is none of ours to change. A file of its own without
imports of this package, so that it costs next to nothing.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    """Does not return."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(1)  # the parent ended before the request was made
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
