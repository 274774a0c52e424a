import os
from pathlib import Path

import pytest

from inferkit.runtime.rank_output import MAX_LINE_BYTES, HiddenFile, RankOutput

SECRET = "marker-6\nmarker-7"
NAME = "<secret MY_API_KEY>"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_secret_is_found_however_it_is_cut(tmp_path: Path, size: int) -> None:
    """Also one of several lines, and the password of an address."""
    file = HiddenFile(tmp_path / "log")
    data = f"a {SECRET} b\nhttp://me:pass@h/ \u00e9\rmarker\n{SECRET}".encode() + b"\xff"

    for start in range(0, len(data), size):
        file.write(data[start : start + size])
    file.close()

    wanted = f"a {NAME} b\nhttp://me:<secret>@h/ \u00e9\rmarker\n{NAME}".encode() + b"\xff"
    assert (tmp_path / "log").read_bytes() == wanted


def test_whole_lines_are_there_at_once_and_a_long_one_in_parts(tmp_path: Path) -> None:
    file = HiddenFile(tmp_path / "log")

    file.write(b"one\ntw")
    assert (tmp_path / "log").read_bytes() == b"one\n"
    file.write(bytes(MAX_LINE_BYTES))
    assert (tmp_path / "log").stat().st_size > MAX_LINE_BYTES


def test_what_was_written_before_the_end_is_kept(tmp_path: Path) -> None:
    """Where somebody holds an end open, as a child that lives on does."""
    output = RankOutput(tmp_path, [3])
    held = [os.open(path, os.O_WRONLY) for path in output.writers[3]]
    for descriptor in held:
        os.write(descriptor, b"x" * 1000 + b"\nlast")

    output.close()

    for name in ("stdout", "stderr"):
        assert (tmp_path / f"rank3.{name}.log").read_text() == "x" * 1000 + "\nlast"
    for descriptor in held:
        os.close(descriptor)


def test_a_file_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    output = RankOutput(tmp_path / "no such folder", [0])
    end = os.open(output.writers[0][0], os.O_WRONLY)
    os.write(end, b"text\n")
    os.close(end)
    output.close()
