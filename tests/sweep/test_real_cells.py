"""Cells that generate: a tiny random model in processes of its own for each."""

from pathlib import Path

import pytest

from tests.sweep.moody import finished, results
from tests.sweep.test_plan import TINY

QUICK = ("data.limit=4", "scheduler.max_new_tokens=4")
# A scheduler of a user's own, which looks at the batch that it is given.
SCHEDULER = """
import os
import signal
import time

from inferkit.scheduler.scheduler import Scheduler


class Moody(Scheduler):
    def __init__(self, *, mood, **kwargs):
        super().__init__(**kwargs)
        self.mood = "" if os.path.exists("cured") else mood.get(str(kwargs["batch_size"]), "")
        if self.mood == "raises":
            raise ValueError("no good mood")

    def run_step(self, *args, **kwargs):
        if self.mood == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mood == "hangs":
            time.sleep(10_000)
        return super().run_step(*args, **kwargs)
"""
OPTION = """
# A scheduler that behaves as it is told.
defaults: [default, _self_]
_target_: own_scheduler.Moody
params:
  mood: {"5": raises, "7": dies, "9": hangs}
"""


@pytest.mark.multiproc
def test_a_committed_sweep_runs_cells_of_different_ranks(tmp_path: Path) -> None:
    words = ["+sweep=split", *TINY, *QUICK, "scheduler.batch_size=2", "hydra.sweep.dir=sweep"]

    code, out, err = finished(*words, cwd=tmp_path)

    assert code == 0, err
    assert "3 of 3 cells ended ok" in out
    cells = results(tmp_path / "sweep")
    assert [cell["overrides"][-1] for cell in cells.values()] == [
        "scheduler.max_new_tokens=4",
    ] * 3
    assert all(cell["metrics"]["output_tokens_per_s"] > 0 for cell in cells.values())
    logs = [len(list((tmp_path / "sweep" / str(n)).glob("rank*.log"))) for n in range(3)]
    assert logs == [1, 2, 2]


@pytest.mark.full
def test_three_of_twelve_cells_fail_in_their_ranks(tmp_path: Path) -> None:
    (tmp_path / "own_scheduler.py").write_text(SCHEDULER)
    options = tmp_path / "options" / "scheduler"
    options.mkdir(parents=True)
    (options / "moody.yaml").write_text(OPTION.lstrip())
    words = ["-m", "--config-dir", "options", *TINY, *QUICK, "scheduler=moody"]
    words += ["allowed_targets=[own_scheduler]", "scheduler.batch_size=range(1,13)"]

    code, out, err = finished(
        *words, "sweep.cell_timeout_s=60", "hydra.sweep.dir=sweep", cwd=tmp_path, limit_s=900
    )

    assert code == 1, err
    errors = {n: cell["error"] for n, cell in results(tmp_path / "sweep").items() if cell["error"]}
    assert list(errors) == [4, 6, 8]
    assert "ValueError: no good mood" in errors[4]
    assert "killed by SIGKILL" in errors[6]
    assert errors[8] == "did not end within sweep.cell_timeout_s=60"
    assert "9 of 12 cells ended ok; 2 failed, 1 timeout" in out

    (tmp_path / "cured").touch()
    code, out, err = finished("resume", "sweep", cwd=tmp_path, limit_s=900)

    assert code == 0, err
    assert "9 are finished already; 3 to run" in err
    assert "12 of 12 cells ended ok" in out
