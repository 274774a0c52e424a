"""Batch rows of requests that exist in the tests of the sampler only."""

from typing import Any

from inferkit.core.batch import BatchRow
from inferkit.core.request import Request
from inferkit.core.sampling_params import SamplingParams


def make_row(
    *,
    request_id: int = 0,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    seed: int = 0,
    sample_index: int = 0,
    **sampling: Any,
) -> BatchRow:
    request = Request(
        request_id=request_id,
        prompt_token_ids=[0] if prompt is None else prompt,
        output_token_ids=output or [],
        sampling=SamplingParams(**sampling),
        seed=seed,
        sample_index=sample_index,
    )
    return BatchRow(
        request=request,
        num_computed_tokens=request.num_tokens - 1,
        num_scheduled_tokens=1,
        is_prefill=False,
        samples=True,
    )
