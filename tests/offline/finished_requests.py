"""Requests and step records with round times."""

from typing import Any

from inferkit.core.request import FinishReason, Request, RequestState
from inferkit.core.sampling_params import SamplingParams
from inferkit.scheduler.step_record import StepKind, StepRecord


def make_request(request_id: int = 0, **values: Any) -> Request:
    """Arrived at 10 s, scheduled at 11 s, tokens at 12, 14, 18 s, finished at 18 s."""
    fields: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3, 4],
        "output_token_ids": [5, 6, 7],
        "arrival_time_s": 10.0,
        "first_scheduled_time_s": 11.0,
        "token_times_s": [12.0, 14.0, 18.0],
        "finish_time_s": 18.0,
        "state": RequestState.FINISHED,
        "finish_reason": FinishReason.LENGTH,
    }
    return Request(request_id=request_id, sampling=SamplingParams(), seed=9, **(fields | values))


def make_record(step: int, kind: StepKind, time_s: float, **values: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "num_requests": 1,
        "num_tokens": 1,
        "num_prefill_tokens": 0,
        "kv_used": 2,
        "kv_total": 8,
        "num_waiting": 0,
        "num_running": 1,
        "num_preempted": 0,
        "start_s": 11.0,
        "inference_time_s": time_s / 2,
    }
    return StepRecord(step=step, kind=kind, step_time_s=time_s, **(fields | values))
