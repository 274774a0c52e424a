"""One cell in a real process; the program that it runs is Python itself."""

import json
import signal
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from inferkit.sweep.cell_run import CellRun
from inferkit.sweep.cells import LOG_FILE, JobResult, read_result
from inferkit.sweep.leftovers import adopted_orphans
from inferkit.sweep.plan import PlannedCell

HELPERS = """
import json, os, signal, subprocess, sys, time
from inferkit.runtime.live_progress import PROGRESS_FILE
from inferkit.sweep.cells import JobResult
from pathlib import Path

def write(status, **facts):
    JobResult(number=0, overrides=("x",), status=status, **facts).write(Path("FOLDER"))
"""
RunCell = Callable[..., JobResult]


@pytest.fixture
def run_cell(tmp_path: Path) -> RunCell:
    """`run_cell(source, **options)`: the result of a cell that runs `source`."""

    def run(source: str, **options: Any) -> JobResult:
        text = HELPERS.replace("FOLDER", str(tmp_path)) + textwrap.dedent(source)
        cell = PlannedCell(number=3, overrides=("a=3",), folder=tmp_path)
        result = CellRun(cell, program=(sys.executable, "-c", text), **options).run(run_key="key")
        assert read_result(tmp_path) == result
        assert (result.number, result.overrides, result.run_key) == (3, ("a=3",), "key")
        return result

    return run


def test_a_cell_that_ends_well(run_cell: RunCell, tmp_path: Path) -> None:
    result = run_cell("print('hello'); write('ok', metrics={'tokens': 3})")

    assert (result.status, result.error, result.metrics) == ("ok", None, {"tokens": 3})
    assert result.seconds > 0
    assert (tmp_path / LOG_FILE).read_text() == "hello\n"


@pytest.mark.parametrize(
    ("source", "status", "error"),
    [
        ("write('failed', error='no luck'); sys.exit(1)", "failed", "no luck"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "failed", "killed by SIGKILL"),
        ("write('ok'); os.abort()", "failed", "killed by SIGABRT"),
        ("sys.exit(1)", "failed", "exit code 1: it told no reason; see "),
        (
            "print('inferkit: 1 fault\\n\\n  data.limit=0', file=sys.stderr); sys.exit(2)",
            "failed",
            "exit code 2: 1 fault",
        ),
        ("pass", "failed", "exit code 0: it told no reason"),
        ("write('interrupted', error='ended by SIGINT'); sys.exit(130)", "interrupted", "ended by"),
    ],
)
def test_a_cell_that_does_not(run_cell: RunCell, source: str, status: str, error: str) -> None:
    result = run_cell(source)

    assert result.status == status
    assert (result.error or "").startswith(error)


def test_a_cell_that_hangs_is_told_to_end_then_killed(run_cell: RunCell) -> None:
    patient = run_cell("time.sleep(1000)", timeout_s=0.5)
    deaf = run_cell(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
        timeout_s=2.0,
        grace_s=0.5,
    )

    for result, limit in ((patient, "0.5"), (deaf, "2")):
        assert result.status == "timeout"
        assert result.error == f"did not end within sweep.cell_timeout_s={limit}"
        assert result.seconds < 60


def test_a_second_signal_does_not_wait(run_cell: RunCell) -> None:
    signals: list[int] = []
    threading.Timer(0.5, lambda: signals.extend([signal.SIGTERM, signal.SIGINT])).start()

    result = run_cell(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)", signals=signals
    )

    assert (result.status, result.error) == ("interrupted", "ended with the sweep by SIGTERM")


def test_progress_is_passed_on_and_leaves_nothing(run_cell: RunCell, tmp_path: Path) -> None:
    told: list[Any] = []

    run_cell(
        """
        from inferkit.runtime.live_progress import live_progress
        with live_progress() as progress:
            progress.begin("generating", total=8)
            time.sleep(1.0)
        write("ok")
        """,
        on_progress=told.append,
    )

    assert {"stage": "generating", "completed": 0, "total": 8, "status": ""} in told
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOG_FILE, "result.json"]


def test_nothing_that_a_killed_cell_has_started_stays(run_cell: RunCell, tmp_path: Path) -> None:
    """A rank has a session of its own and may be stuck where it hears nothing."""
    with adopted_orphans() as end_leftovers:
        run_cell(
            """
            stuck = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
            rank = subprocess.Popen([sys.executable, "-c", stuck], start_new_session=True)
            Path("FOLDER/pid").write_text(str(rank.pid))
            os.kill(os.getpid(), signal.SIGKILL)
            """.replace("FOLDER", str(tmp_path))
        )
        pid = int((tmp_path / "pid").read_text())
        assert psutil.pid_exists(pid)

        assert end_leftovers() == 1

    assert not psutil.pid_exists(pid)
    assert end_leftovers() == 0


def test_results_of_further_nodes_lie_apart(tmp_path: Path) -> None:
    cell = PlannedCell(number=0, overrides=(), folder=tmp_path)

    CellRun(cell, node_rank=2, program=(sys.executable, "-c", "")).run()

    assert json.loads((tmp_path / "node2" / "result.json").read_text())["status"] == "failed"
    assert not (tmp_path / "result.json").exists()
