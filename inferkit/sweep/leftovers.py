"""Nothing of a cell is left when the next one begins, also where its parent was killed.

A rank ends with its parent by itself, unless it is stuck in foreign code. So orphans become
children of this process (Linux only), which ends those that stay.
"""

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator

import psutil

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 3.0
"""How long a rank may take to see that its parent has ended."""
MAX_ROUNDS = 5
"""Each round adopts the children of those that the last one has ended."""


@contextlib.contextmanager
def adopted_orphans() -> Iterator[Callable[[], int]]:
    """Yields a function that ends all processes that were started, by children too, since this
    was entered; it returns how many it had to kill."""
    known = {child.pid for child in psutil.Process().children(recursive=True)}
    _set_subreaper(True)
    try:
        yield lambda: _end_all_but(known)
    finally:
        _set_subreaper(False)


def _end_all_but(known: set[int]) -> int:
    num_killed = 0
    for _ in range(MAX_ROUNDS):
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in known]
        if not left:
            break
        _, stuck = psutil.wait_procs(left, timeout=GRACE_S)
        for process in stuck:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(stuck, timeout=GRACE_S)
        num_killed += len(stuck)
    return num_killed


def _set_subreaper(is_on: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)
