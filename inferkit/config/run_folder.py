"""A folder of its own for every run, also for runs that start in the same instant."""

import itertools
from datetime import datetime
from pathlib import Path

RUNS = Path("outputs")
SWEEPS = Path("outputs/sweeps")


def make_run_folder(base: Path, now: datetime) -> Path:
    """Create `base/<date>/<time>-<n>` with the smallest n that is free; n counts from 1.

    The folder did not exist before: two processes never get the same one.
    """
    day = base / now.strftime("%Y-%m-%d")
    day.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = day / f"{now.strftime('%H-%M-%S')}-{number}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise AssertionError("a count has no end")
