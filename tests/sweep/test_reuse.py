from pathlib import Path

import pytest

from inferkit.core.errors import ConfigError
from inferkit.sweep.cells import FAILED, OK, JobResult, read_result
from inferkit.sweep.plan import PlannedCell
from inferkit.sweep.record import SweepRecord, read_record
from inferkit.sweep.reuse import earlier_folders, one_at_a_time, reuse_results


def cells(sweep_dir: Path, *names: str) -> list[PlannedCell]:
    return [
        PlannedCell(number=number, overrides=(f"a={number}",), folder=sweep_dir / name)
        for number, name in enumerate(names)
    ]


def leave(folder: Path, key: str, *, status: str = OK) -> None:
    """What an earlier cell has left; `mark` tells it from others."""
    folder.mkdir(parents=True)
    (folder / "mark").write_text(key)
    JobResult(number=9, overrides=("old",), status=status, run_key=key).write(folder)


def marks(sweep_dir: Path) -> dict[str, str]:
    found = sorted(sweep_dir.rglob("mark"))
    return {path.parent.relative_to(sweep_dir).as_posix(): path.read_text() for path in found}


def reuse(sweep_dir: Path, wanted: list[PlannedCell], *keys: str) -> set[int]:
    folders = earlier_folders(sweep_dir, wanted)
    return reuse_results(wanted, dict(enumerate(keys)), folders, sweep_dir)


def test_results_that_are_in_their_place_stay(tmp_path: Path) -> None:
    leave(tmp_path / "0", "A")
    leave(tmp_path / "1", "B")

    assert reuse(tmp_path, cells(tmp_path, "0", "1", "2"), "A", "B", "C") == {0, 1}

    assert marks(tmp_path) == {"0": "A", "1": "B"}
    assert not (tmp_path / "earlier").exists()


def test_results_follow_their_cells_to_new_numbers(tmp_path: Path) -> None:
    for name, key in {"0": "A", "1": "B", "2": "C"}.items():
        leave(tmp_path / name, key)

    assert reuse(tmp_path, cells(tmp_path, "0", "1", "2", "3"), "C", "X", "A", "B") == {0, 2, 3}

    assert marks(tmp_path) == {"0": "C", "2": "A", "3": "B"}
    moved = read_result(tmp_path / "3")
    assert moved is not None
    assert (moved.number, moved.overrides, moved.run_key) == (3, ("a=3",), "B")


def test_what_is_of_no_use_is_kept_aside(tmp_path: Path) -> None:
    leave(tmp_path / "0", "A", status=FAILED)
    leave(tmp_path / "1", "old")
    (tmp_path / "2").mkdir()  # a killed sweep leaves a cell without a result
    (tmp_path / "2" / "mark").write_text("half")
    leave(tmp_path / "earlier" / "0-1", "oldest")

    assert reuse(tmp_path, cells(tmp_path, "0", "1", "2"), "A", "B", "C") == set()

    assert marks(tmp_path) == {
        "earlier/0-1": "oldest",
        "earlier/0-2": "A",
        "earlier/1-1": "old",
        "earlier/2-1": "half",
    }


def test_one_result_serves_one_cell_rather_the_one_in_its_place(tmp_path: Path) -> None:
    leave(tmp_path / "1", "A")

    assert reuse(tmp_path, cells(tmp_path, "0", "1"), "A", "A") == {1}

    assert marks(tmp_path) == {"1": "A"}


def test_a_cell_without_a_key_is_never_spared(tmp_path: Path) -> None:
    leave(tmp_path / "0", "")

    assert reuse(tmp_path, cells(tmp_path, "0")) == set()


def test_folders_of_other_names_are_known_by_the_record(tmp_path: Path) -> None:
    leave(tmp_path / "a=1" / "b=2", "A")
    record = SweepRecord(
        command="",
        flags=(),
        overrides=("x",),
        cwd="/",
        cells=({"number": 0, "folder": "a=1/b=2", "overrides": []},),
    )
    record.write(tmp_path)

    assert reuse(tmp_path, cells(tmp_path, "0"), "A") == {0}

    assert marks(tmp_path) == {"0": "A"}
    assert not (tmp_path / "a=1").exists()
    assert read_record(tmp_path) == record


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    with (
        one_at_a_time(tmp_path),
        pytest.raises(ConfigError, match="a sweep is running in"),
        one_at_a_time(tmp_path),
    ):
        pass
    with one_at_a_time(tmp_path):
        pass
