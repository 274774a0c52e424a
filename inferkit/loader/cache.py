"""The folder for files that are fetched or converted once, and how to fill it safely."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from inferkit.core.errors import ModelLoadError

LOCK_TIMEOUT_S = 1800.0
"""Longer than any download that another process may be busy with."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time works on `path`; a killed process releases the lock.

    Raises:
        ModelLoadError: the folder cannot be written, or the lock was not free in time.
    """
    lock_file = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_file)
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout:
        raise ModelLoadError(
            f"another process has held {lock_file} for {LOCK_TIMEOUT_S:.0f}s; end it, or set "
            "INFERKIT_CACHE to another folder"
        ) from None
    except OSError as error:
        raise ModelLoadError(
            f"cannot write to the cache folder {path.parent}: {error}; set INFERKIT_CACHE to a "
            "folder that can be written"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """A new empty folder that takes the place of `final` when the block ends without an error.

    To be used while `locked(final)`. A reader sees the old content or the new one, never a part.
    """
    prefix = f".{final.name}-"
    for left_over in final.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    stage = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    try:
        yield stage
        stage.chmod(0o755)
        if final.exists():
            old = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
            os.replace(final, old / final.name)
            os.replace(stage, final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(stage, final)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
