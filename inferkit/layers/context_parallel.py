"""Prefill context parallelism: all ranks compute each prompt together, its owner keeps the KV.

Every rank owns some requests (it schedules, stores, samples and decodes them). The prompt tokens
that the ranks schedule in a step are divided among all of them: a row of n tokens is cut into
2 * cp segments and rank r computes segments r and 2 * cp - 1 - r, which balances the causal work
(zigzag, reference section 3.5). In every layer the ranks gather each other's keys and values, of
this step's tokens and of what the owners have cached of these rows before.

The gathered tensors are attended to as a cache with blocks of one token, so that every kind of
attention runs unchanged. Legend: P = prompt tokens computed on this rank (first in the packed
order, the owner's decodes after them), G = gathered tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from inferkit.parallel.communicator import Communicator
from inferkit.platforms.paged_cache import PagedCache

Attend = Callable[[slice, tuple[torch.Tensor, ...], Any], torch.Tensor]
"""`attend(tokens, cache, plan)`: attention of these packed tokens over that cache."""


@dataclass(frozen=True, kw_only=True)
class ContextParallelPlan:
    """One attention type in one step, in place of the platform's plan."""

    group: Communicator
    num_prefill: int
    """P."""
    context_slots: torch.Tensor
    """Slots of this rank's cache that queries of its rows see."""
    rows_per_rank: tuple[int, ...]
    """Tokens that each rank gives: its part of all rows, then the context of its own rows."""
    own_rows: torch.Tensor
    """Gathered rows that this rank stores: all tokens of its own rows ..."""
    own_slots: torch.Tensor
    """... and where."""
    prefill: Any
    """The platform's plan over the gathered tensors."""
    decode: Any
    """The platform's plan of the own decodes, or None."""


@dataclass(frozen=True, kw_only=True)
class ContextParallelMetaData:
    """Where the hidden states of sampled rows are."""

    group: Communicator
    last_tokens: torch.Tensor
    """Packed indices of those tokens of this rank that end a sampled row of any rank."""
    rows_per_rank: tuple[int, ...]
    own_rows: torch.Tensor
    """Rows of the gathered ones that this rank samples, in batch order."""
    decode_tokens: torch.Tensor
    """Packed indices of the own decodes, which follow them."""

    def sampled_rows(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [S, H]."""
        last = self.group.all_gather_rows(x_TH[self.last_tokens], self.rows_per_rank)
        return torch.cat((last[self.own_rows], x_TH[self.decode_tokens]))


def write_and_attend(
    plan: Any,
    paged: PagedCache,
    cache: tuple[torch.Tensor, ...],
    values: tuple[torch.Tensor, ...],
    attend: Attend,
) -> torch.Tensor:
    """What every attention layer does in a step: store its tokens' values, then attend.

    Args:
        plan: of the layer's cache; a ContextParallelPlan has the ranks work together.
        cache: this rank's cache tensors [blocks, block size, heads, dim].
        values: what this step's tokens store, [T, heads, dim] each.
    """
    if isinstance(plan, ContextParallelPlan):
        return attend_together(plan, paged, cache, values, attend)
    paged.write(cache, values, plan.slots)
    return attend(slice(None), cache, plan)


def attend_together(
    plan: ContextParallelPlan,
    paged: PagedCache,
    cache: tuple[torch.Tensor, ...],
    values: tuple[torch.Tensor, ...],
    attend: Attend,
) -> torch.Tensor:
    """`write_and_attend` of one layer under context parallelism; every rank must enter."""
    num_prefill = plan.num_prefill
    gathered = tuple(
        plan.group.all_gather_rows(
            torch.cat((value[:num_prefill], tensor.flatten(0, 1)[plan.context_slots])),
            plan.rows_per_rank,
        )
        for value, tensor in zip(values, cache, strict=True)
    )
    paged.write(cache, tuple(value[plan.own_rows] for value in gathered), plan.own_slots)
    shared = tuple(value[:, None] for value in gathered)
    outputs = [attend(slice(0, num_prefill), shared, plan.prefill)] if num_prefill else []
    if plan.decode is not None:
        rest = slice(num_prefill, None)
        paged.write(cache, tuple(value[rest] for value in values), plan.decode.slots)
        outputs.append(attend(rest, cache, plan.decode))
    return torch.cat(outputs)
