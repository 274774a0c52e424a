import io
from pathlib import Path

import pytest
from rich.console import Console

from inferkit.sweep.cells import FAILED, OK, JobResult
from inferkit.sweep.display import SweepDisplay, duration_text, sweep_display
from inferkit.sweep.plan import PlannedCell

CELLS = [
    PlannedCell(number=n, overrides=("model=llama", f"data.limit={n}"), folder=Path(f"sw/{n}"))
    for n in range(3)
]


def result(status: str, seconds: float) -> JobResult:
    error = None if status == OK else "out of [memory]"
    return JobResult(number=0, overrides=(), status=status, seconds=seconds, error=error)


def play(display: SweepDisplay) -> None:
    display.begin(CELLS[0])
    display.show({"stage": "generating", "completed": 1, "total": 8, "status": "step 5 decode"})
    display.end(CELLS[0], result(OK, 30.0))
    display.begin(CELLS[2])
    display.end(CELLS[2], result(FAILED, 40.0))


def test_lines_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=40)

    with sweep_display(CELLS, 3, console=console) as display:
        play(display)

    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "inferkit: cell #0 starts: data.limit=0",
        "inferkit: cell #0 ok after 30.0 s; about 1 min 0 s left",
        "inferkit: cell #2 starts: data.limit=2",
        "inferkit: cell #2 failed after 40.0 s: out of [memory]; see sw/2/cell.log; "
        "about 35 s left",
    ]


def test_bars_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)

    with sweep_display(CELLS, 3, console=console) as display:
        display.begin(CELLS[1])
        display.show({"stage": "generating", "completed": 1, "total": 8, "status": "step 5"})
        display._progress.refresh()

    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0 of 3 cells" in shown
    assert "cell #1" in shown
    assert "data.limit=1  generating: step 5" in shown
    assert "starts" not in shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3725, "1 h 2 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
