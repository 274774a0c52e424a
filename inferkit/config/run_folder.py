"""A folder of its own for every run, also for runs that start in the same instant."""

import itertools
import tempfile
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


def folder_problem(folder: Path) -> str:
    """Why `folder` can be neither used nor made; empty = it can. Leaves nothing behind."""
    place = folder.absolute()
    while not place.exists() and not place.is_symlink():
        place = place.parent
    if not place.is_dir():
        return f"cannot be a folder: {place} is a file"
    try:
        with tempfile.TemporaryDirectory(prefix=".inferkit-", dir=place):
            return ""
    except OSError as error:
        return f"cannot be written: {place}: {error.strerror}"
