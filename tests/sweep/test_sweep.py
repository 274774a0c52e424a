"""Sweeps as a user starts them: what they leave, what they tell, how they end."""

import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from inferkit import cli
from tests.sweep.moody import (
    finished,
    numbers,
    pids_of,
    ran,
    results,
    start,
    wait_until,
    write_package,
)

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self"), reason="needs Linux")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_package(tmp_path)
    return tmp_path


def test_three_of_twelve_cells_fail_and_only_they_are_resumed(folder: Path) -> None:
    words = numbers("range(12)", raises=2, dies=5, hangs=7)

    code, out, err = finished(
        "-m", *words, "sweep.cell_timeout_s=20", "hydra.sweep.dir=sweep", cwd=folder
    )

    assert code == 1, err
    cells = results(folder / "sweep")
    assert {n: cell["status"] for n, cell in cells.items() if cell["status"] != "ok"} == {
        2: "failed",
        5: "failed",
        7: "timeout",
    }
    assert {n: cells[n]["error"] for n in (2, 5, 7)} == {
        2: "out of luck",
        5: "killed by SIGKILL",
        7: "did not end within sweep.cell_timeout_s=20",
    }
    assert "WorkerError" in cells[2]["traceback"]
    assert all(cell["number"] == n and cell["run_key"] for n, cell in cells.items())
    assert cells[3]["overrides"][-2:] == ["runner.params.number=3", "sweep.cell_timeout_s=20"]
    assert cells[3]["metrics"]["output_tokens_per_s"] == 103
    assert ran(folder) == list(range(12))
    assert "9 of 12 cells ended ok; 2 failed, 1 timeout" in out
    for text in (
        "inferkit: sweep of 12 cells in sweep\n",
        "inferkit: cell #2 failed after",
        ": out of luck; see sweep/2/cell.log; about",
        "inferkit: cell #7 timeout after",
    ):
        assert text in err
    assert {"summary.csv", "sweep.json", "multirun.yaml"} <= {
        path.name for path in (folder / "sweep").iterdir()
    }
    assert list((folder / "sweep").glob("*.png"))
    assert not pids_of(folder / "sweep")
    assert "to run what has not ended ok: python -m inferkit resume sweep\n" in err

    (folder / "cured").touch()
    code, out, err = finished("resume", str(folder / "sweep"), cwd=Path("/"))

    assert code == 0, err
    assert ran(folder)[12:] == [2, 5, 7]
    assert "9 are finished already; 3 to run" in err
    assert "12 of 12 cells ended ok" in out
    assert {cell["status"] for cell in results(folder / "sweep").values()} == {"ok"}
    assert sorted(path.name for path in (folder / "sweep/earlier").iterdir()) == [
        "2-1",
        "5-1",
        "7-1",
    ]


def test_a_cell_is_a_single_run_that_can_be_repeated(folder: Path) -> None:
    code, _, err = finished("-m", *numbers("4,5"), "hydra.sweep.dir=sweep", cwd=folder)
    assert code == 0, err
    facts = json.loads((folder / "sweep/1/provenance.json").read_text())
    program, *words = shlex.split(facts["command"].replace("python -m inferkit", "inferkit"))

    code, _, err = finished(*[word for word in words if "hydra.run.dir" not in word], cwd=folder)

    assert program == "inferkit"
    assert code == 0, err
    assert "-m" not in words
    assert ran(folder) == [4, 5, 5]


def test_the_same_command_resumes_in_its_folder_and_a_grid_may_grow(folder: Path) -> None:
    command = ["-m", "hydra.sweep.dir=sweep"]
    assert finished(*command, *numbers("4,5"), cwd=folder)[0] == 0

    code, _, err = finished(*command, *numbers("5,6,4"), cwd=folder)

    assert code == 0, err
    assert ran(folder) == [4, 5, 6]
    cells = results(folder / "sweep")
    assert [cell["metrics"]["output_tokens_per_s"] for cell in cells.values()] == [105, 106, 104]
    assert [cell["number"] for cell in cells.values()] == [0, 1, 2]
    assert not (folder / "sweep/earlier").exists()

    code, _, err = finished("resume", "sweep", "runner.params.number=4", cwd=folder)

    assert code == 0, err
    assert ran(folder) == [4, 5, 6]
    assert "2 earlier results are of no cell as it is now" in err
    assert sorted(path.name for path in (folder / "sweep/earlier").iterdir()) == ["0-1", "1-1"]


def test_a_failure_may_end_the_sweep(folder: Path) -> None:
    words = [*numbers("0,1,2", raises=1), "sweep.on_failure=stop", "hydra.sweep.dir=sweep"]

    code, out, err = finished("-m", *words, cwd=folder)

    assert code == 1
    assert ran(folder) == [0, 1]
    assert "no further cell is started (sweep.on_failure=stop)" in err
    assert list(results(folder / "sweep")) == [0, 1]
    assert "1 of 3 cells ended ok" in out


def test_invalid_cells_are_left_out_where_that_is_asked_for(folder: Path) -> None:
    words = [*numbers("3"), "kv_cache.block_size=0,16", "sweep.skip_invalid=true"]

    code, out, err = finished("-m", *words, "hydra.sweep.dir=sweep", cwd=folder)

    assert code == 0, err
    assert "1 of 2 cells cannot run and are left out (sweep.skip_invalid=true)" in err
    cells = results(folder / "sweep")
    assert [cell["status"] for cell in cells.values()] == ["invalid", "ok"]
    assert cells[0]["error"].startswith("kv_cache.block_size=0: ")
    assert "1 of 2 cells ended ok; 1 invalid (not run)" in out
    assert ran(folder) == [3]


def test_ctrl_c_ends_the_cell_and_leaves_a_summary(folder: Path) -> None:
    words = [*numbers("0,1,2", hangs=1), "hydra.sweep.dir=sweep"]
    running = start("-m", *words, cwd=folder)
    wait_until(lambda: ran(folder) == [0, 1], "the second cell begins")

    os.killpg(running.pid, signal.SIGINT)  # as a terminal does, to the whole group
    out, err = running.communicate(timeout=60)

    assert running.returncode == 130, err
    cells = results(folder / "sweep")
    assert [cell["status"] for cell in cells.values()] == ["ok", "interrupted"]
    assert cells[1]["error"] == "ended with the sweep by SIGINT"
    assert "1 of 3 cells ended ok; 1 interrupted, 1 not run" in out
    assert "Traceback" not in err
    assert (folder / "sweep/summary.csv").exists()
    assert not pids_of(folder / "sweep")


def test_a_killed_sweep_leaves_no_cell_and_can_be_resumed(folder: Path) -> None:
    words = [*numbers("0,1", hangs=1), "hydra.sweep.dir=sweep"]
    running = start("-m", *words, cwd=folder)
    wait_until(lambda: ran(folder) == [0, 1], "the second cell begins")
    (cell,) = pids_of(folder / "sweep")
    assert os.getpgid(cell) != running.pid

    second = finished("-m", *words, cwd=folder)
    running.kill()
    running.communicate(timeout=60)

    assert second[0] == 2
    assert "a sweep is running in sweep; wait for its end" in second[2]
    wait_until(lambda: not pids_of(folder / "sweep"), "the cell ends with its sweep")
    (folder / "cured").touch()
    code, _, err = finished("resume", "sweep", cwd=folder)
    assert code == 0, err
    assert ran(folder) == [0, 1, 1]


def test_folders_may_be_named_by_overrides(folder: Path) -> None:
    words = [*numbers("4,5"), "hydra.sweep.dir=sweep"]
    subdir = "hydra.sweep.subdir='number_${runner.params.number}/of_${hydra:job.num}'"

    code, out, err = finished("-m", *words, subdir, cwd=folder)

    assert code == 0, err
    assert "2 of 2 cells ended ok" in out
    assert json.loads((folder / "sweep/number_5/of_1/result.json").read_text())["number"] == 1
    code, out, err = finished("resume", "sweep", cwd=folder)
    assert code == 0, err
    assert "2 are finished already; 0 to run" in err
    assert ran(folder) == [4, 5]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume"], "resume needs the folder of a sweep as its first word"),
        (["resume", "nothing"], "nothing: there is no such folder"),
        (["resume", "moody_package"], "moody_package is no folder of a sweep"),
        (
            ["-m", *numbers("4,5"), "hydra.sweep.subdir=same"],
            "hydra.sweep.subdir=same gives cell #1 the folder same, where cell #0 has same; leave",
        ),
        (
            ["-m", *numbers("4,5"), "hydra.sweep.subdir='../x${hydra:job.num}'"],
            "gives cell #0 the folder ../x0, which is not below that of the sweep",
        ),
    ],
)
def test_refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))

    assert cli.run(words) == 2

    err = capfd.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert ran(folder) == []


# A launcher that runs its jobs here, as any plugin that is not Hydra's own.
PLUGIN = """
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore


class MoodyLauncher(BasicLauncher):
    pass


ConfigStore.instance().store(
    group="hydra/launcher",
    name="moody",
    node={"_target_": "hydra_plugins.moody_launcher.MoodyLauncher"},
)
"""


def test_a_launcher_plugin_runs_the_same_cells(folder: Path) -> None:
    (folder / "hydra_plugins").mkdir()
    (folder / "hydra_plugins" / "moody_launcher.py").write_text(PLUGIN)
    words = [*numbers("0,1,2", raises=1), "hydra/launcher=moody", "hydra.sweep.dir=sweep"]

    code, out, err = finished("-m", *words, "sweep.on_failure=stop", cwd=folder)

    assert code == 1, err
    assert ran(folder) == [0, 1, 2]
    assert "sweep.on_failure=stop: has no effect with a launcher or sweeper plugin" in err
    assert "inferkit: cell #1 failed after" in err
    assert "2 of 3 cells ended ok; 1 failed" in out
    assert [cell["number"] for cell in results(folder / "sweep").values()] == [0, 1, 2]

    (folder / "cured").touch()
    code, out, err = finished("resume", "sweep", "sweep.on_failure=continue", cwd=folder)

    assert code == 0, err
    assert ran(folder) == [0, 1, 2, 1]
    assert "3 of 3 cells ended ok" in out
