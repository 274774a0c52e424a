"""What a user gets for one prompt."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from inferkit.core.request import Request, TokenLogprobs
from inferkit.offline.prompts import Prompt

MIN_LOGPROB = -9999.0
"""Written instead of minus infinity, which is no JSON."""


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """One generation. Times are seconds; None where there were not enough tokens to have one."""

    request_id: int
    prompt: Prompt
    text: str
    """Special tokens skipped, cut before a stop string."""
    token_ids: list[int]
    """All output tokens, an end-of-sequence or stop token included."""
    prompt_token_ids: list[int]
    """The prompt as it was run, after truncation."""
    num_truncated_tokens: int = 0
    """Tokens that the prompt lost at its end: it was longer than data.input_truncated_len."""
    finish_reason: str
    """stop, length, prompt_too_long, refused, or abort."""
    finish_detail: str = ""
    """A sentence, where the reason alone does not explain it."""
    seed: int = 0
    """With `sample_index`, what the draws of this generation depend on."""
    sample_index: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per output token, where the sampling parameters ask for them."""
    ttft_s: float | None = None
    """Time to first token, from arrival."""
    tpot_s: float | None = None
    """Mean time per output token after the first."""
    queue_s: float | None = None
    """From arrival to the first step that computed a part of the prompt."""
    e2e_s: float | None = None
    """From arrival to the end."""

    @classmethod
    def from_request(cls, request: Request, prompt: Prompt, text: str) -> "GenerationResult":
        return cls(
            request_id=request.request_id,
            prompt=prompt,
            text=text,
            token_ids=list(request.output_token_ids),
            prompt_token_ids=list(request.prompt_token_ids),
            num_truncated_tokens=request.num_truncated_tokens,
            finish_reason=str(request.finish_reason or ""),
            finish_detail=request.finish_detail,
            seed=request.seed,
            sample_index=request.sample_index,
            logprobs=list(request.output_logprobs),
            ttft_s=ttft_s(request),
            tpot_s=tpot_s(request),
            queue_s=_since_arrival(request, request.first_scheduled_time_s),
            e2e_s=_since_arrival(request, request.finish_time_s),
        )

    def to_json(self) -> str:
        """One line for generations.jsonl."""
        values: dict[str, Any] = asdict(self)
        for entry in values["logprobs"]:
            entry["logprob"] = max(entry["logprob"], MIN_LOGPROB)
            entry["top"] = [(token_id, max(p, MIN_LOGPROB)) for token_id, p in entry["top"]]
        return json.dumps(values, ensure_ascii=False, allow_nan=False)


OnResult = Callable[[GenerationResult], None]
"""Called with each result of a DP rank as soon as its request has ended."""


def ttft_s(request: Request) -> float | None:
    """Seconds from arrival to the first token."""
    return _since_arrival(request, request.token_times_s[0] if request.token_times_s else None)


def tpot_s(request: Request) -> float | None:
    """Mean seconds per token after the first."""
    times = request.token_times_s
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def _since_arrival(request: Request, time_s: float | None) -> float | None:
    return None if time_s is None else time_s - request.arrival_time_s
