"""What is told before a sweep starts."""

from pathlib import Path

import pytest

from inferkit.core.exit_codes import EXIT_REFUSED
from inferkit.sweep.record import SweepRecord
from inferkit.sweep.start import resume_sweep


def test_a_wrong_word_of_resume_is_told_without_a_command_that_replaces_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ("scheduler.batch_size=8,4,1,2",)
    record = SweepRecord(command="", flags=("-m",), overrides=overrides, cwd=str(tmp_path / "gone"))
    record.write(tmp_path)

    assert resume_sweep(tmp_path, ["scheduler.batchsize=3"]) == EXIT_REFUSED

    told = capsys.readouterr().err
    assert "did you mean scheduler.batch_size?" in told
    assert "this works" not in told and "batch_size=3 hydra.sweep.dir" not in told
    assert f" resume {tmp_path} ...\n" in told
