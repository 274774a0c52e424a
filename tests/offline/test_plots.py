"""The step-time picture is drawn for every kind of run."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from inferkit.offline.plots import plot_steps
from inferkit.scheduler.step_record import StepRecord
from tests.offline.finished_requests import make_record

DECODES = [make_record(i, "decode", 0.03, kv_used=i % 8) for i in range(30)]
RUNS: dict[str, list[StepRecord]] = {
    "all kinds, long prefill": [
        make_record(0, "prefill", 1.0),
        make_record(1, "mixed", 0.2),
        *DECODES[2:],
    ],
    "decodes only": DECODES,
    "one step": [make_record(0, "prefill", 0.5)],
    "no time at all": [make_record(0, "decode", 0.0), make_record(1, "decode", 0.0)],
    "two DP ranks": [make_record(i // 2, "decode", 0.03, dp_rank=i % 2) for i in range(21)],
}


@pytest.mark.parametrize("run", RUNS)
def test_a_picture_with_content_is_written(run: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.png"
    assert plot_steps(RUNS[run], path)
    image = imread(path)
    assert image.shape[:2] == (720, 1200)
    assert 0.5 < float(image[..., :3].mean()) < 1.0


def test_a_run_without_a_step_has_no_picture(tmp_path: Path) -> None:
    assert not plot_steps([], tmp_path / "steps.png")
    assert list(tmp_path.iterdir()) == []
