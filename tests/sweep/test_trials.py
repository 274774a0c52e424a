"""What becomes of the trials of a search when it is started again."""

from dataclasses import replace
from pathlib import Path

from inferkit.config.schema import ExeModeConfig, InferenceConfig, ModelConfig, PlatformConfig
from inferkit.sweep.cells import FAILED, OK, JobResult, read_result
from inferkit.sweep.plan import PlannedCell
from inferkit.sweep.record import SweepRecord
from inferkit.sweep.trials import (
    are_current,
    is_finished,
    set_trials_aside,
    take_equal,
    trial_folders,
)

CONFIG = InferenceConfig(
    model=ModelConfig(_target_="x", name="x"),
    platform=PlatformConfig(_target_="auto"),
    exe_mode=ExeModeConfig(_target_="x", name="eager"),
)


def leave(folder: Path, key: str, *, status: str = OK) -> None:
    """What a trial has left; `mark` tells it from others."""
    folder.mkdir(parents=True)
    (folder / "mark").write_text(key)
    JobResult(number=9, overrides=("old",), status=status, run_key=key).write(folder)


def trial(sweep_dir: Path, number: int) -> PlannedCell:
    """As Hydra starts it: its folder is there."""
    folder = sweep_dir / str(number)
    (folder / ".hydra").mkdir(parents=True)
    return PlannedCell(number=number, overrides=(f"a={number}",), folder=folder)


def marks(sweep_dir: Path) -> dict[str, str]:
    found = sorted(sweep_dir.rglob("mark"))
    return {path.parent.relative_to(sweep_dir).as_posix(): path.read_text() for path in found}


def test_an_earlier_search_is_set_aside_whole(tmp_path: Path) -> None:
    leave(tmp_path / "0", "A")
    leave(tmp_path / "deep" / "1", "B", status=FAILED)
    leave(tmp_path / "earlier" / "0-1", "oldest")
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "cell.log").write_text("killed")
    (tmp_path / "notes").mkdir()
    (tmp_path / "optimization_results.yaml").write_text("best")

    assert set_trials_aside(tmp_path) == 3

    assert marks(tmp_path) == {"earlier/0-1": "oldest", "earlier/0-2": "A", "earlier/deep-1-1": "B"}
    assert (tmp_path / "earlier" / "2-1" / "cell.log").read_text() == "killed"
    assert (tmp_path / "earlier" / "optimization_results.yaml-1").read_text() == "best"
    assert trial_folders(tmp_path) == [] and (tmp_path / "notes").is_dir()


def test_an_equal_trial_of_the_same_search_is_copied(tmp_path: Path) -> None:
    leave(tmp_path / "0", "A")
    wanted = trial(tmp_path, 2)

    result = take_equal(wanted, "A", tmp_path)

    assert result is not None and result == read_result(wanted.folder)
    assert (result.number, result.overrides, result.run_key) == (2, ("a=2",), "A")
    assert marks(tmp_path) == {"0": "A", "2": "A"}


def test_an_equal_trial_of_an_earlier_start_comes_back(tmp_path: Path) -> None:
    leave(tmp_path / "earlier" / "0-1", "B")
    leave(tmp_path / "earlier" / "1-1", "A")

    result = take_equal(trial(tmp_path, 0), "A", tmp_path)

    assert result is not None and (result.number, result.overrides) == (0, ("a=0",))
    assert marks(tmp_path) == {"0": "A", "earlier/0-1": "B"}


def test_a_trial_that_failed_or_is_another_one_spares_no_run(tmp_path: Path) -> None:
    leave(tmp_path / "0", "A", status=FAILED)
    leave(tmp_path / "1", "B")

    assert take_equal(trial(tmp_path, 2), "A", tmp_path) is None

    assert marks(tmp_path) == {"0": "A", "1": "B"}


def test_a_search_is_finished_with_all_its_trials_under_the_same_words() -> None:
    record = SweepRecord(command="", flags=("-m",), overrides=("a=choice(1,2)",), cwd="")
    ended = replace(record, trials=("0", "1"), ended_at="2026-01-31T12:00:00+0000")

    assert is_finished(ended, ["a=choice(1,2)"], ["-m"], 2)
    assert is_finished(ended, ["a=choice(1,2)"], ["-m"], 0)
    assert not is_finished(ended, ["a=choice(1,2)"], ["-m"], 3)
    assert not is_finished(ended, ["a=choice(1,2)", "b=1"], ["-m"], 2)
    assert not is_finished(replace(ended, ended_at=None), ["a=choice(1,2)"], ["-m"], 2)
    assert not is_finished(replace(ended, trials=()), ["a=choice(1,2)"], ["-m"], 0)


def test_trials_without_the_result_of_today_are_not_current(tmp_path: Path) -> None:
    leave(tmp_path / "0", "A")
    known = replace(trial(tmp_path, 0), config=CONFIG)

    assert are_current([known], {0: "A"})
    assert not are_current([known], {0: "B"})
    assert not are_current([known], {})
    assert not are_current([known, replace(trial(tmp_path, 1), config=CONFIG)], {0: "A", 1: "B"})
