"""The cache folder: where it is, and that it is never seen half filled."""

import subprocess
import sys
from pathlib import Path

import pytest

from inferkit.core.errors import ModelLoadError
from inferkit.core.model_cache import cache_dir
from inferkit.loader.cache import locked, staged_folder

ROOT = Path(__file__).resolve().parents[2]


def test_the_folder_is_taken_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("INFERKIT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "inferkit"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/inferkit")
    monkeypatch.setenv("INFERKIT_CACHE", "~/models")
    assert cache_dir() == tmp_path / "models"


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    final = tmp_path / "model"
    for content in ("old", "new"):
        with staged_folder(final) as stage:
            (stage / "file").write_text(content)
            assert not final.exists() or (final / "file").read_text() == "old"
        assert (final / "file").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failure_leaves_the_old_folder_and_no_litter(tmp_path: Path) -> None:
    final = tmp_path / "model"
    with staged_folder(final) as stage:
        (stage / "file").write_text("old")
    with pytest.raises(RuntimeError), staged_folder(final) as stage:
        (stage / "file").write_text("half")
        raise RuntimeError
    assert (final / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".model-x").mkdir()
    (tmp_path / ".model-x" / "half").write_text("")
    with staged_folder(tmp_path / "model"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_second_process_waits_for_the_lock(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from inferkit.loader.cache import locked\n"
        "with locked(Path(sys.argv[1])): print('inside')"
    )
    with locked(tmp_path / "model"):
        other = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "model")], stdout=subprocess.PIPE, cwd=ROOT
        )
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=2.0)
    out, _ = other.communicate(timeout=60.0)
    assert out == b"inside\n"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ModelLoadError, match="cannot write to the cache folder .*INFERKIT_CACHE"),
        locked(tmp_path / "file" / "model"),
    ):
        pass
