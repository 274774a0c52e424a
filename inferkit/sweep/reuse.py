"""Results of an earlier start of a sweep: which cells they spare, and where the others go.

A result is of use where it is ok and of the same run_key, whatever number its cell had. Folders
whose place is taken, or that no cell wants, go to DIR/earlier/<name>-<k>: nothing is lost.
"""

import fcntl
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from inferkit.core.errors import ConfigError
from inferkit.sweep.cells import OK, read_result
from inferkit.sweep.plan import PlannedCell
from inferkit.sweep.record import SWEEP_FILE, read_record

EARLIER = "earlier"


def earlier_folders(sweep_dir: Path, cells: Sequence[PlannedCell]) -> list[Path]:
    """Folders that an earlier start has left: those that it recorded, and those in the way."""
    recorded: list[Path] = []
    if (sweep_dir / SWEEP_FILE).exists():
        recorded = [sweep_dir / str(cell["folder"]) for cell in read_record(sweep_dir).cells]
    names = dict.fromkeys([*recorded, *(cell.folder for cell in cells)])
    return [folder for folder in names if folder.exists()]


def has_ended_ok(folder: Path) -> bool:
    result = read_result(folder)
    return result is not None and result.status == OK


def reuse_results(
    cells: Sequence[PlannedCell],
    keys: Mapping[int, str],
    folders: Iterable[Path],
    sweep_dir: Path,
) -> set[int]:
    """Bring results to the cells that they are of, and all other earlier folders out of the way.

    Args:
        keys: number of a cell -> its run_key.

    Returns the numbers of the cells that need no run.
    """
    folders = list(folders)
    sources = _sources(cells, keys, folders)
    moved = {
        folder: set_aside(folder, sweep_dir)
        for folder in folders
        if not any(folder == source == cell.folder for cell, source in sources)
    }
    for cell, source in sources:
        if source != cell.folder:
            cell.folder.parent.mkdir(parents=True, exist_ok=True)
            moved[source].rename(cell.folder)
        result = read_result(cell.folder)
        assert result is not None, "it was read a moment ago"
        replace(result, number=cell.number, overrides=cell.overrides).write(cell.folder)
    _remove_if_empty(sweep_dir / EARLIER)
    return {cell.number for cell, _ in sources}


def _sources(
    cells: Sequence[PlannedCell], keys: Mapping[int, str], folders: Sequence[Path]
) -> list[tuple[PlannedCell, Path]]:
    """Cells -> the folder that holds their result: rather the one that is at its place."""
    by_key: dict[str, list[Path]] = {}
    for folder in folders:
        result = read_result(folder)
        if result is not None and result.status == OK and result.run_key:
            by_key.setdefault(result.run_key, []).append(folder)
    found = []
    for is_in_place in (True, False):
        for cell in cells:
            known = by_key.get(keys.get(cell.number, ""), [])
            if is_in_place and cell.folder in known:
                known.remove(cell.folder)
                found.append((cell, cell.folder))
            elif not is_in_place and known and all(cell is not other for other, _ in found):
                found.append((cell, known.pop(0)))
    return found


def set_aside(folder: Path, sweep_dir: Path) -> Path:
    """Move a folder, or a file, to DIR/earlier; returns its new place."""
    name = "-".join(folder.relative_to(sweep_dir).parts)
    for count in itertools.count(1):
        place = sweep_dir / EARLIER / f"{name}-{count}"
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            folder.rename(place)
            for parent in folder.relative_to(sweep_dir).parents[:-1]:
                _remove_if_empty(sweep_dir / parent)
            return place
    raise AssertionError("a count has no end")


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


@contextmanager
def one_at_a_time(sweep_dir: Path) -> Iterator[None]:
    """The folder is this process's alone meanwhile; the system gives it back when it dies.

    Raises:
        ConfigError: a sweep runs in it.
    """
    place = os.open(sweep_dir, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"a sweep is running in {sweep_dir}; wait for its end, or choose another folder "
            "(hydra.sweep.dir=...)"
        ) from None
    else:
        yield
    finally:
        os.close(place)
