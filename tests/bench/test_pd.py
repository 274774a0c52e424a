import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferkit.bench.pd import Times, summary

ROOT = Path(__file__).resolve().parents[2]


def pd(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inferkit.bench.pd", *args],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_ratios_are_taken_within_a_round():
    def one_round(*ttfts_ms: float) -> list[Times]:
        return [Times(ttft_s=ms / 1000, tpot_s=2 * ms / 1000) for ms in ttfts_ms]

    # The machine was half as fast in the second round: the ratio does not change.
    serve = [one_round(9, 10, 30), one_round(18, 20, 60)]
    cluster = [one_round(14, 15, 16), one_round(28, 30, 90)]
    result = summary(serve, cluster)
    ttft = {key: round(value, 6) for key, value in result["ttft"].items()}
    assert (ttft["ratio"], ttft["ratio_min"], ttft["ratio_max"]) == (1.5, 1.5, 1.5)
    assert (ttft["serve_ms"], ttft["cluster_ms"]) == (15, 22.5)
    assert (ttft["added_ms"], ttft["added_best_ms"]) == (7.5, 5)
    assert result["tpot"]["ratio"] == pytest.approx(1.5)


def test_answers_of_one_token_have_no_time_between_tokens():
    result = summary([[Times(ttft_s=1, tpot_s=0)]], [[Times(ttft_s=2, tpot_s=0)]])
    assert result["ttft"]["ratio"] == 2 and result["tpot"]["ratio"] is None


def test_an_override_that_does_not_exist_is_one_message():
    result = pd("scheduler.batch=3")
    assert result.returncode == 1
    assert "scheduler.batch" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.soak
@pytest.mark.timeout(700)
def test_the_command_compares_a_cluster_with_one_instance(tiny_hf_model):
    overrides = ["model=llama", f"model.path={tiny_hf_model('llama')}", "model.dtype=float32"]
    overrides += ["engine.warm_up=false", "kv_cache.num_blocks=16"]
    result = pd("--rounds", "1", "--requests", "2", "--output-len", "3", *overrides)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert "platform.num_threads=1" in report["workload"]["overrides"]
    assert report["ttft"]["ratio"] > 0 and report["tpot"]["serve_ms"] > 0
