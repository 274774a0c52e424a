"""The content of metrics.json, from step records and finished requests.

Definitions. All times are seconds of the scheduler's clock unless a name says otherwise.

    ttft_s               first token - arrival, per request; arrival = when it was queued, so
                         waiting for other requests is part of it
    tpot_s               (last token - first token) / (tokens - 1), per request
    queue_s              first step that computed a part of the prompt - arrival
    e2e_s                end - arrival
    wall_time_s          end of the last step - first arrival; with DP ranks, whose clocks differ,
                         the longest of their times from first to last step
    num_steps            steps of the DP rank that took most; kv_blocks_* are of one DP rank
    *_tokens_per_s       prompt, output, and both tokens of all requests, over wall_time_s
    steps.<kind>         prefill: only prompts; decode: only one token per request; mixed: both
      step_time_s        the whole step; inference_time_s: the forward's part of it
    collective_share     time in collectives over time in steps, waiting for other ranks included
    steady_decode_mean_s mean inference time of decode steps without the first, and without those
                         more than 1.5 interquartile ranges outside the middle half
    expert_load          null without experts; per layer the tokens that each expert was chosen for,
                         over all ranks, and their imbalance: the largest over the mean (1 = even);
                         imbalance over all is that of the least even layer

Percentiles interpolate linearly; a figure without samples is null.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inferkit.core.request import Request
from inferkit.offline.result import tpot_s, ttft_s
from inferkit.scheduler.step_record import StepKind, StepRecord, by_dp_rank

OUTLIER_IQRS = 1.5
STEP_KINDS: tuple[StepKind, ...] = ("prefill", "decode", "mixed")


def collect_metrics(
    records: Sequence[StepRecord],
    requests: Sequence[Request],
    *,
    peak_memory_bytes: int,
    load_time_s: float | None = None,
    expert_load: Mapping[int, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Plain JSON data; see the definitions above.

    Args:
        records: all steps of the run, in order.
        requests: all requests of the run, refused ones included.
        peak_memory_bytes: from the platform.
        load_time_s: from nothing to the first request.
        expert_load: of the engine.
    """
    ran = [request for request in requests if request.first_scheduled_time_s is not None]
    wall_time_s = _wall_time_s(records, requests)
    num_prompt_tokens = sum(request.num_prompt_tokens for request in ran)
    num_output_tokens = sum(len(request.output_token_ids) for request in ran)
    num_cached_tokens = sum(request.num_cached_tokens for request in ran)
    return {
        "num_requests": len(requests),
        "finish_reasons": dict(Counter(str(r.finish_reason or "unfinished") for r in requests)),
        "num_truncated_prompts": sum(request.num_truncated_tokens > 0 for request in requests),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "num_computed_tokens": sum(record.num_tokens for record in records),
        "load_time_s": load_time_s,
        "wall_time_s": wall_time_s,
        "prompt_tokens_per_s": _ratio(num_prompt_tokens, wall_time_s),
        "output_tokens_per_s": _ratio(num_output_tokens, wall_time_s),
        "total_tokens_per_s": _ratio(num_prompt_tokens + num_output_tokens, wall_time_s),
        "ttft_s": statistics([ttft_s(request) for request in requests]),
        "tpot_s": statistics([tpot_s(request) for request in requests]),
        "queue_s": statistics(
            [_difference(request.first_scheduled_time_s, request.arrival_time_s) for request in ran]
        ),
        "e2e_s": statistics(
            [_difference(request.finish_time_s, request.arrival_time_s) for request in ran]
        ),
        "num_steps": max(map(len, by_dp_rank(records)), default=0),
        "steps": {kind: _step_metrics(records, kind) for kind in STEP_KINDS},
        "steady_decode_mean_s": steady_decode_mean_s(records),
        "collective_share": _ratio(
            sum(record.collective_time_s for record in records),
            sum(record.step_time_s for record in records),
        ),
        "kv_blocks_total": records[0].kv_total if records else None,
        "kv_blocks_used_max": max((record.kv_used for record in records), default=0),
        "num_preemptions": sum(record.num_preempted for record in records),
        "num_cached_prompt_tokens": num_cached_tokens,
        "prefix_cache_hit_rate": _ratio(num_cached_tokens, num_prompt_tokens),
        "peak_memory_bytes": peak_memory_bytes,
        "expert_load": None if expert_load is None else expert_load_metrics(expert_load),
    }


def expert_load_metrics(load: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """Layer -> counts per expert, with their imbalance; null where no token was computed."""
    imbalance = {
        layer: _ratio(max(counts) * len(counts), sum(counts)) for layer, counts in load.items()
    }
    return {
        "imbalance": max(
            (value for value in imbalance.values() if value is not None), default=None
        ),
        "layers": {
            str(layer): {"imbalance": imbalance[layer], "counts": counts}
            for layer, counts in load.items()
        },
    }


def statistics(values: Sequence[float | None]) -> dict[str, float | int | None]:
    """Number of samples, mean and percentiles of the values that are there."""
    present = np.array([value for value in values if value is not None])
    if not len(present):
        return {"num": 0, "mean": None, "p50": None, "p90": None, "p99": None}
    p50, p90, p99 = np.percentile(present, [50, 90, 99]).tolist()
    return {"num": len(present), "mean": float(present.mean()), "p50": p50, "p90": p90, "p99": p99}


def steady_decode_mean_s(records: Sequence[StepRecord]) -> float | None:
    """Mean inference time of decode steps without the first one and without outliers."""
    times = [record.inference_time_s for record in records if record.kind == "decode"][1:]
    if not times:
        return None
    low, high = np.percentile(times, [25, 75]).tolist()
    margin = OUTLIER_IQRS * (high - low)
    kept = [time_s for time_s in times if low - margin <= time_s <= high + margin]
    return float(np.mean(kept))


def _step_metrics(records: Sequence[StepRecord], kind: StepKind) -> dict[str, Any]:
    of_kind = [record for record in records if record.kind == kind]
    return {
        "num_tokens": sum(record.num_tokens for record in of_kind),
        "step_time_s": statistics([record.step_time_s for record in of_kind]),
        "inference_time_s": statistics([record.inference_time_s for record in of_kind]),
    }


def _wall_time_s(records: Sequence[StepRecord], requests: Sequence[Request]) -> float:
    ranks = by_dp_rank(records)
    if len(ranks) == 1:
        start_s = min((request.arrival_time_s for request in requests), default=records[0].start_s)
        return _end_s(records) - start_s
    return max((_end_s(steps) - steps[0].start_s for steps in ranks), default=0.0)


def _end_s(records: Sequence[StepRecord]) -> float:
    return records[-1].start_s + records[-1].step_time_s


def _ratio(value: float, base: float) -> float | None:
    return value / base if base > 0 else None


def _difference(end: float | None, start: float) -> float | None:
    return None if end is None else end - start
