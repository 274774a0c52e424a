import json
from pathlib import Path

import pytest

from inferkit.runtime.live_progress import PROGRESS_FILE, live_progress


def test_a_run_that_no_sweep_has_started_leaves_no_file(tmp_path: Path) -> None:
    with live_progress() as progress:
        progress.begin("loading")

    assert list(tmp_path.iterdir()) == []


def test_stages_are_told_at_once_and_what_follows_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "progress.json"
    monkeypatch.setenv(PROGRESS_FILE, str(file))

    with live_progress() as progress:
        progress.begin("loading")
        loading = json.loads(file.read_text())
        progress.begin("generating", total=8)
        for number in range(8):
            progress.update(number, status=f"step {number}")
        generating = json.loads(file.read_text())
        progress._written_s -= 1.0  # a moment later
        progress.update(8, status="step 8")

    assert loading == {"stage": "loading", "completed": 0, "total": None, "status": ""}
    assert generating == {"stage": "generating", "completed": 0, "total": 8, "status": ""}
    assert json.loads(file.read_text())["status"] == "step 8"
