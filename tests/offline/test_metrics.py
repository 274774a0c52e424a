"""Every figure against a number worked out by hand."""

import json
from typing import Any

import pytest

from inferkit.core.request import FinishReason
from inferkit.offline.metrics import collect_metrics, statistics, steady_decode_mean_s
from tests.offline.finished_requests import make_record, make_request


def collect(records: list[Any], requests: list[Any]) -> dict[str, Any]:
    metrics = collect_metrics(records, requests, peak_memory_bytes=1000, load_time_s=2.5)
    json.dumps(metrics, allow_nan=False)
    return metrics


def test_figures_of_a_run() -> None:
    records = [
        make_record(0, "prefill", 1.0, num_tokens=8, kv_used=5),
        make_record(1, "mixed", 2.0, num_tokens=3, start_s=12.0),
        make_record(3, "decode", 4.0, num_tokens=1, num_preempted=1, start_s=14.0),
    ]
    requests = [
        make_request(0),
        make_request(1, output_token_ids=[5], token_times_s=[13.0], num_cached_tokens=2),
        make_request(
            2,
            output_token_ids=[],
            token_times_s=[],
            first_scheduled_time_s=None,
            finish_time_s=10.0,
            finish_reason=FinishReason.PROMPT_TOO_LONG,
        ),
    ]
    metrics = collect(records, requests)
    assert metrics["num_requests"] == 3
    assert metrics["finish_reasons"] == {"length": 2, "prompt_too_long": 1}
    # The refused prompt was never run: 4 + 4 prompt tokens and 3 + 1 output tokens.
    assert (metrics["num_prompt_tokens"], metrics["num_output_tokens"]) == (8, 4)
    assert metrics["num_computed_tokens"] == 8 + 3 + 1
    assert metrics["wall_time_s"] == 8.0  # arrival at 10, end of the last step at 18
    assert metrics["prompt_tokens_per_s"] == 1.0
    assert metrics["output_tokens_per_s"] == 0.5
    assert metrics["total_tokens_per_s"] == 1.5
    assert metrics["ttft_s"]["num"] == 2
    assert metrics["ttft_s"]["mean"] == metrics["ttft_s"]["p50"] == 2.5
    assert metrics["tpot_s"] == {"num": 1, "mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert metrics["queue_s"]["mean"] == 1.0
    assert metrics["e2e_s"]["mean"] == 8.0
    assert metrics["num_steps"] == 3
    assert metrics["steps"]["prefill"]["step_time_s"]["mean"] == 1.0
    assert metrics["steps"]["mixed"]["inference_time_s"]["p99"] == 1.0
    assert metrics["steps"]["decode"]["num_tokens"] == 1
    assert metrics["steady_decode_mean_s"] is None
    assert (metrics["kv_blocks_used_max"], metrics["kv_blocks_total"]) == (5, 8)
    assert metrics["num_preemptions"] == 1
    assert metrics["num_cached_prompt_tokens"] == 2
    assert metrics["prefix_cache_hit_rate"] == 0.25
    assert (metrics["peak_memory_bytes"], metrics["load_time_s"]) == (1000, 2.5)


def test_a_run_in_which_nothing_ran_has_nulls() -> None:
    metrics = collect([], [])
    assert metrics["output_tokens_per_s"] is None
    assert metrics["ttft_s"] == {"num": 0, "mean": None, "p50": None, "p90": None, "p99": None}
    assert metrics["wall_time_s"] == 0.0
    assert metrics["expert_load"] is None


def test_percentiles_interpolate_and_skip_what_is_missing() -> None:
    figures = statistics([None, *[float(i) for i in range(101)]])
    assert figures == {"num": 101, "mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert statistics([1.0, 2.0])["p90"] == pytest.approx(1.9)


def test_steady_decode_mean_drops_the_first_decode_and_outliers() -> None:
    times = [50.0, 2.0, 2.2, 1.8, 2.0, 30.0, 0.0, 2.0]
    records = [make_record(0, "prefill", 9.0)]
    records += [make_record(i, "decode", 2 * t) for i, t in enumerate(times, start=1)]
    assert steady_decode_mean_s(records) == pytest.approx(2.0)


def test_steady_decode_mean_of_equal_times_keeps_them() -> None:
    records = [make_record(i, "decode", 4.0) for i in range(3)]
    assert steady_decode_mean_s(records) == 2.0


def test_imbalance_of_experts_is_the_largest_load_over_the_mean() -> None:
    metrics = collect_metrics(
        [], [], peak_memory_bytes=0, expert_load={1: [2, 2, 2, 2], 3: [6, 0, 1, 1], 5: [0, 0, 0, 0]}
    )
    json.dumps(metrics, allow_nan=False)
    load = metrics["expert_load"]
    assert load["imbalance"] == 3.0
    assert [entry["imbalance"] for entry in load["layers"].values()] == [1.0, 3.0, None]
    assert load["layers"]["3"]["counts"] == [6, 0, 1, 1]


def test_dp_ranks_have_clocks_and_steps_of_their_own() -> None:
    """Rank 1 ran longer, on a machine whose clock is far ahead; rank 0 took more steps."""
    records = [
        make_record(0, "prefill", 1.0, start_s=11.0, collective_time_s=0.5),
        make_record(1, "decode", 1.0, start_s=12.0),
        make_record(2, "decode", 1.0, start_s=13.0),
        make_record(0, "prefill", 2.0, start_s=9000.0, dp_rank=1),
        make_record(1, "decode", 3.0, start_s=9002.0, dp_rank=1, collective_time_s=1.5),
    ]
    metrics = collect(records, [make_request(0), make_request(1)])
    assert metrics["wall_time_s"] == 5.0
    assert metrics["num_steps"] == 3
    assert metrics["output_tokens_per_s"] == 6 / 5
    assert metrics["collective_share"] == 2.0 / 8.0
