from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from inferkit.config.run_folder import folder_problem, make_run_folder

NOW = datetime(2026, 5, 4, 13, 2, 1)


def test_folders_are_named_by_time_and_counted(tmp_path: Path) -> None:
    folders = [make_run_folder(tmp_path / "outputs", NOW) for _ in range(3)]

    assert [folder.relative_to(tmp_path).as_posix() for folder in folders] == [
        "outputs/2026-05-04/13-02-01-1",
        "outputs/2026-05-04/13-02-01-2",
        "outputs/2026-05-04/13-02-01-3",
    ]


def test_runs_of_one_instant_never_share_a_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(lambda _: make_run_folder(tmp_path, NOW), range(64)))

    assert len(set(folders)) == 64


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("")

    with pytest.raises(OSError, match="outputs"):
        make_run_folder(tmp_path / "outputs", NOW)


def test_a_folder_that_can_be_made_has_no_problem(tmp_path: Path) -> None:
    assert folder_problem(tmp_path) == ""
    assert folder_problem(tmp_path / "a" / "b") == ""
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")

    for folder in (file, file / "a" / "b"):
        assert folder_problem(folder) == f"cannot be a folder: {file} is a file"


def test_a_link_to_nothing_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")

    assert folder_problem(tmp_path / "link" / "a").startswith("cannot be a folder")


def test_a_place_that_takes_no_files_is_named() -> None:
    assert folder_problem(Path("/proc/x")).startswith("cannot be written: /proc: ")
