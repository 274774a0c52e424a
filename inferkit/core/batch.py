"""What the scheduler hands to the engine for one step. Holds no tensors."""

from dataclasses import dataclass, field

from inferkit.core.request import Request
from inferkit.core.sampling_params import SamplingParams

DUMMY_REQUEST_ID = -1


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """One request's share of a step: positions [num_computed, num_computed + num_scheduled)."""

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int
    is_prefill: bool
    """This row computes tokens that were known before: a prompt, or an output so far after a
    preemption."""
    samples: bool
    """This row reaches the request's last token, so the next token is sampled in this step."""
    draft_token_ids: tuple[int, ...] = ()
    next_prompt_token: int | None = None
    """The prompt token that follows this chunk, for a drafter; None when the row samples."""

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def token_ids(self) -> list[int]:
        start = self.num_computed_tokens
        return self.request.token_ids(start, start + self.num_scheduled_tokens)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of one step, prefill rows first. A dummy batch changes no request and no block."""

    rows: list[BatchRow] = field(default_factory=list)
    is_dummy: bool = False

    @property
    def is_prefill(self) -> bool:
        return any(row.is_prefill for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_scheduled_tokens for row in self.rows)


def dummy_batch(*, num_rows: int = 1, num_computed_tokens: int = 0, num_tokens: int = 1) -> Batch:
    """Rows of a request that nobody knows: they read and write the null block only."""
    request = Request(
        request_id=DUMMY_REQUEST_ID,
        prompt_token_ids=[0] * (num_computed_tokens + num_tokens),
        sampling=SamplingParams(temperature=0.0),
        seed=0,
    )
    row = BatchRow(
        request=request,
        num_computed_tokens=num_computed_tokens,
        num_scheduled_tokens=num_tokens,
        is_prefill=num_computed_tokens == 0,
        samples=True,
    )
    return Batch(rows=[row] * num_rows, is_dummy=True)
