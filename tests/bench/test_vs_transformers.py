import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferkit.bench.vs_transformers import METRICS, _ratios

ROOT = Path(__file__).resolve().parents[2]


def test_a_ratio_above_one_means_that_inferkit_is_better():
    ours = {"tokens_per_s": 30.0, "ttft_s": 1.0, "tpot_s": 2.0, "peak_memory_bytes": 50.0}
    theirs = {"tokens_per_s": 10.0, "ttft_s": 3.0, "tpot_s": 1.0, "peak_memory_bytes": 100.0}
    ratios = _ratios([{"inferkit": ours, "transformers": theirs}])
    medians = {metric: ratios[metric]["median"] for metric in METRICS}
    assert medians == {
        "tokens_per_s": 3.0,
        "ttft_s": 3.0,
        "tpot_s": 0.5,
        "peak_memory_bytes": 2.0,
    }


def test_a_wrong_override_is_one_message():
    result = subprocess.run(
        [sys.executable, "-m", "inferkit.bench.vs_transformers", "--prompts", "1", "foo=1"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "foo" in result.stderr and "Traceback" not in result.stderr


def test_the_command_measures_both_sides(tiny_hf_model, tmp_path):
    result = subprocess.run(
        [
            *(sys.executable, "-m", "inferkit.bench.vs_transformers"),
            *("--rounds", "2", "--prompts", "1,3", "--prompt-len", "6", "--output-len", "5"),
            *("model=llama", f"model.path={tiny_hf_model('llama')}"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert [workload["num_prompts"] for workload in report["workloads"]] == [1, 3]
    for workload in report["workloads"]:
        assert len(workload["rounds"]) == 2
        for measured in workload["rounds"]:
            for side in ("inferkit", "transformers"):
                figures = measured[side]
                # All tokens were made: their number over the rate is at least the time that the
                # first token and the four after it took.
                total_s = workload["num_prompts"] * 5 / figures["tokens_per_s"]
                assert total_s >= 0.9 * (figures["ttft_s"] + 4 * figures["tpot_s"]) > 0
        ratio = workload["ratios"]["tokens_per_s"]
        values = [
            m["inferkit"]["tokens_per_s"] / m["transformers"]["tokens_per_s"]
            for m in workload["rounds"]
        ]
        assert ratio["min"] == pytest.approx(min(values))
        assert ratio["max"] == pytest.approx(max(values))
