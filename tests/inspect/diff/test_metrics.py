import math
from typing import Any

import pytest

from inferkit.inspect.diff.metrics import compare_metrics

NAMES = ["ttft_s.p50", "output_tokens_per_s", "num_requests"]


@pytest.mark.parametrize(
    ("name", "left", "right", "verdict"),
    [
        ("ttft_s", 1.0, 0.5, "better"),
        ("ttft_s", 1.0, 1.5, "worse"),
        ("ttft_s", 1.0, 1.019, "equal"),
        ("ttft_s", 0.0, 0.5, "worse"),
        ("queue_s.p50", 0.00012, 0.00026, "equal"),
        ("queue_s.p50", 0.0001, 0.002, "worse"),
        ("tpot_s.p50", 0.0005, 0.0004, "better"),
        ("output_tokens_per_s", 10, 20, "better"),
        ("output_tokens_per_s", 20, 10, "worse"),
        ("goodput", 2, 1, "worse"),
        ("peak_memory_bytes", 2, 1, "better"),
        ("prefix_cache_hit_rate", 0.1, 0.5, "better"),
        ("num_preemptions", 0, 3, "worse"),
        ("num_requests", 4, 8, ""),
    ],
)
def test_which_way_is_better(name: str, left: float, right: float, verdict: str) -> None:
    (found,) = compare_metrics({name: left}, {name: right})

    assert found.verdict == verdict


def test_ratio_is_of_the_right_to_the_left_side() -> None:
    (found,) = compare_metrics({"e2e_s": 2.0}, {"e2e_s": 3.0})
    (zero,) = compare_metrics({"e2e_s": 0.0}, {"e2e_s": 3.0})

    assert found.ratio == 1.5
    assert zero.ratio is None


def test_figures_of_both_runs_are_compared_and_nothing_else() -> None:
    left = {"ttft_s": {"num": 3, "mean": 1.0, "p50": None}, "name": "x", "is_ok": True, "old_s": 1}
    right = {"ttft_s": {"num": 3, "mean": 2.0, "p50": 1.0}, "name": "y", "is_ok": False}

    assert [pair.name for pair in compare_metrics(left, right)] == ["ttft_s.num", "ttft_s.mean"]
    assert compare_metrics(left, None) == ()
    assert compare_metrics({"a_s": math.nan}, {"a_s": 1.0}) == ()


def test_experts_one_by_one_are_left_out() -> None:
    metrics = {"expert_load": {"imbalance": 1.5, "layers": {"0": {"counts": [1], "imbalance": 2}}}}

    assert [pair.name for pair in compare_metrics(metrics, metrics)] == ["expert_load.imbalance"]


def test_people_see_no_details() -> None:
    left: dict[str, Any] = {"num_requests": 4, "num_steps": 5, "queue_s": 0.0}
    left["tpot_s"] = {"num": 3, "mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0}
    right = left | {"num_steps": 6, "tpot_s": {name: 2.0 for name in left["tpot_s"]}}
    left["steps"] = {"decode": {"inference_time_s": {"p50": 1.0}}}
    right["steps"] = {"decode": {"inference_time_s": {"p50": 2.0}}}

    shown = [pair.name for pair in compare_metrics(left, right) if not pair.is_detail]

    assert shown == ["num_steps", "tpot_s.p50", "tpot_s.p99"]
