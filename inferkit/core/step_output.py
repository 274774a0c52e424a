"""What the engine returns for one step."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inferkit.core.request import TokenLogprobs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """Result of one `forward_batch`.

    `logits` is [S, V] float32, one row per sampling row of the batch, in batch order; times are
    seconds of the device, from launch to completion.
    """

    next_tokens: dict[int, list[int]]
    """request id -> 1..n+1 new tokens; only rows that sample are present."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    logits: "torch.Tensor | None" = None
    hidden_states: "torch.Tensor | None" = None
    inference_time: float = 0.0
    inference_time_main: float = 0.0
    inference_times_mtp: list[float] = field(default_factory=list)
    collective_time: float = 0.0
    """Seconds of the step in collectives, waiting for other ranks included."""
