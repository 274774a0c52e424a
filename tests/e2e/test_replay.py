"""A run of two ranks that samples is replayed: the same tokens come again."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def inferkit(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inferkit", *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.multiproc
def test_a_run_that_samples_is_replayed(tmp_path: Path, tiny_hf_model: Callable[..., Path]) -> None:
    (tmp_path / "model").symlink_to(tiny_hf_model("llama"))
    words = ["model=llama", "model.path=model", "model.dtype=float32", "parallel=dp2"]
    words += ["data.temperature=1", "data.limit=5", "scheduler.max_new_tokens=6"]
    run = inferkit(*words, "hydra.run.dir=first", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    again = inferkit("replay", "../first", "--output", "again", cwd=elsewhere)

    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.splitlines()[-1] == "same tokens: 5 of 5 requests"
    lines = (tmp_path / "first" / "generations.jsonl").read_text().splitlines()
    assert len({json.loads(line)["seed"] for line in lines}) == 5
    assert json.loads((elsewhere / "again" / "provenance.json").read_text())["replay"][
        "same_tokens"
    ]
