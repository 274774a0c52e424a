"""What is kept of one step, for metrics, the step-time picture and the sweep table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

StepKind = Literal["prefill", "decode", "mixed"]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of the scheduler, counted when it ended."""

    step: int
    """Number of the step in this run, from 0."""
    kind: StepKind
    num_requests: int
    num_tokens: int
    """Tokens that were computed, of prompts and of decodes."""
    num_prefill_tokens: int
    kv_used: int
    """KV blocks in use while the step ran, the blocks that it took included."""
    kv_total: int
    """KV blocks that requests can use (without the null block)."""
    num_waiting: int
    num_running: int
    num_preempted: int
    """Requests that lost their blocks in this step."""
    start_s: float
    """Clock of the scheduler when the step began."""
    step_time_s: float
    """Wall time of the whole step: scheduling, inputs, forward, sampling, bookkeeping."""
    inference_time_s: float
    """The forward's part of it."""
    collective_time_s: float = 0.0
    """Of the step, spent in collectives, waiting for other ranks included."""
    dp_rank: int = 0
    """Whose step it is; DP ranks count theirs independently."""


def by_dp_rank(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """The steps of each DP rank that took any, in order."""
    ranks: dict[int, list[StepRecord]] = {}
    for record in records:
        ranks.setdefault(record.dp_rank, []).append(record)
    return list(ranks.values())
