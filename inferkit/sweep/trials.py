"""Trials of a search, which has no grid: nothing of an earlier start is overwritten, and values
that were tried before are not run again.

Before a search starts, the trials of an earlier start go to DIR/earlier/<name>-<k>. A trial takes
the result of an equal one, by run_key: it moves one from there, or copies one of its own search.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from inferkit.sweep.cells import INVALID, LOG_FILE, OK, RESULT_FILE, JobResult, read_result
from inferkit.sweep.plan import PlannedCell
from inferkit.sweep.record import SweepRecord
from inferkit.sweep.reuse import EARLIER, set_aside

FOUND_FILE = "optimization_results.yaml"
"""What Optuna's sweeper leaves in the folder of the sweep."""
TRACES = (RESULT_FILE, LOG_FILE, ".hydra")
"""A folder with one of them is that of a trial."""


def trial_folders(sweep_dir: Path) -> list[Path]:
    """Folders of trials, also of such as were killed, without those in earlier/."""
    return list(_trials_below(sweep_dir, left_out=(EARLIER,)))


def _trials_below(folder: Path, left_out: Sequence[str] = ()) -> Iterator[Path]:
    for child in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not child.is_dir() or child.name in left_out or child.name.startswith("."):
            continue
        if any((child / name).exists() for name in TRACES):
            yield child
        else:
            yield from _trials_below(child)


def set_trials_aside(sweep_dir: Path) -> int:
    """Move what an earlier search has left out of the way; returns how many trials."""
    folders = trial_folders(sweep_dir)
    for path in [*folders, sweep_dir / FOUND_FILE]:
        if path.exists():
            set_aside(path, sweep_dir)
    return len(folders)


def is_finished(
    record: SweepRecord, overrides: Sequence[str], flags: Sequence[str], num_trials: int
) -> bool:
    """Whether the recorded search is the one that is asked for, and came to its end.

    Args:
        num_trials: that are wanted; 0 = not known.
    """
    is_same = (record.overrides, record.flags) == (tuple(overrides), tuple(flags))
    return bool(is_same and record.ended_at and len(record.trials) >= max(1, num_trials))


def are_current(trials: Sequence[PlannedCell], keys: Mapping[int, str]) -> bool:
    """Whether every trial has a result that a run of today would have as well.

    Args:
        keys: number of a trial -> its run_key, as things are now.
    """
    return all(_is_current(trial, keys.get(trial.number)) for trial in trials)


def _is_current(trial: PlannedCell, key: str | None) -> bool:
    result = read_result(trial.folder)
    if result is None:
        return False
    if trial.config is None:
        return result.status == INVALID
    return result.status == OK and key is not None and result.run_key == key


def take_equal(trial: PlannedCell, key: str, sweep_dir: Path) -> JobResult | None:
    """Bring the result of an equal trial into the folder of this one; None where there is none."""
    for folder in trial_folders(sweep_dir):
        if folder != trial.folder and _has(folder, key):
            shutil.copytree(folder, trial.folder, dirs_exist_ok=True, symlinks=True)
            return _own_result(trial)
    for folder in _trials_below(sweep_dir / EARLIER):
        if _has(folder, key) and _moved(folder, trial.folder):
            return _own_result(trial)
    return None


def _has(folder: Path, key: str) -> bool:
    result = read_result(folder)
    return result is not None and result.status == OK and result.run_key == key


def _moved(source: Path, target: Path) -> bool:
    """False where another process was faster."""
    taken = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        source.rename(taken)
    except FileNotFoundError:
        return False
    shutil.rmtree(target, ignore_errors=True)  # what Hydra has written of the trial so far
    taken.rename(target)
    return True


def _own_result(trial: PlannedCell) -> JobResult:
    result = read_result(trial.folder)
    assert result is not None, "it was read a moment ago"
    result = replace(result, number=trial.number, overrides=trial.overrides)
    result.write(trial.folder)
    return result
