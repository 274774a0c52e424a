import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferkit.bench.scaling import _summary

ROOT = Path(__file__).resolve().parents[2]


def scaling(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inferkit.bench.scaling", *args],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_ratios_are_taken_within_a_round():
    def run(tokens_per_s: float, collective_share: float = 0.0) -> dict[str, float]:
        return {
            "output_tokens_per_s": tokens_per_s,
            "num_steps": 10,
            "wall_time_s": 2.0,
            "collective_share": collective_share,
        }

    # The machine was half as fast in the second round: the ratio does not change.
    first, second = [run(100.0), run(50.0)], [run(150.0, 0.2), run(75.0, 0.4)]
    summary = _summary("tp2", second, first)
    assert (summary["ratio"], summary["ratio_min"], summary["ratio_max"]) == (1.5, 1.5, 1.5)
    assert summary["num_ranks"] == 2 and summary["steps_per_s"] == 5.0
    assert summary["collective_share"] == pytest.approx(0.3)


def test_a_split_that_does_not_exist_is_one_message():
    result = scaling("--splits", "tp1,tq2")
    assert result.returncode == 1
    assert "tq2" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.multiproc
def test_the_command_measures_every_split(tiny_hf_model):
    overrides = ["model=llama", f"model.path={tiny_hf_model('llama')}", "model.dtype=float32"]
    sizes = ["--rounds", "1", "--prompts", "2", "--prompt-len", "8", "--output-len", "4"]
    result = scaling("--splits", "tp1,tp2,dp2", *sizes, *overrides)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    shares = {row["split"]: row["collective_share"] for row in report["splits"]}
    # Ranks of a dense model without TP run free of each other.
    assert shares["tp1"] == shares["dp2"] == 0.0 < shares["tp2"] < 1.0
    assert all(row["output_tokens_per_s"] > 0 for row in report["splits"])
