"""Which tokens the ranks of one expert-TP group bring to the experts together.

All ranks of a `moe_tp_group` hold slices of the same experts, so they must bring the same tokens,
while an attention-TP group holds copies of one DP rank's tokens:

    moe_tp >= attn_tp   the group spans DP ranks and brings the tokens of all of them
    moe_tp <  attn_tp   the group is one of several in an attention-TP group and brings its part

Legend: T = tokens of this DP rank, G = tokens that this rank brings.
"""

import torch

from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.layers.context import ModelContext
from inferkit.layers.token_exchange import TokenExchange


class MoETokens:
    """Brings tokens together or divides them, and undoes it. Building one is collective."""

    def __init__(self, ctx: ModelContext) -> None:
        layout = ctx.comm.layout
        self.exchange = TokenExchange("moe", ctx)
        if layout.moe_ep_size > 1 and layout.attn_dp_size > 1:
            ctx.comm.joins_dp_ranks = True
        attn, moe = layout.attn_tp_size, layout.moe_tp_size
        attn_tp_rank = layout.attn_tp_rank(ctx.comm.rank)
        self.num_parts = max(1, attn // moe)
        self.part = attn_tp_rank // moe
        self.is_first_of_alike = attn_tp_rank % min(attn, moe) == 0
        """Of the ranks that bring this DP rank's tokens, or this part of them, the first one."""
        self.parts_group = ctx.comm.register_group(
            "moe_parts_group",
            subgroups=[
                tuple(range(base + position, base + attn, moe))
                for base in range(0, layout.world_size, attn)
                for position in range(min(moe, attn))
            ],
        )

    def bring(self, x: torch.Tensor, metadata: ForwardMetaData) -> torch.Tensor:
        """[T, ...] of this DP rank -> [G, ...]."""
        if self.num_parts == 1:
            return self.exchange.gather_tokens(x, metadata)
        start, end = self._bounds(len(x))[self.part]
        return x[start:end]

    def take(self, x: torch.Tensor, num_tokens: int, metadata: ForwardMetaData) -> torch.Tensor:
        """[G, ...] -> [T, ...] of this DP rank, on all of its ranks."""
        if self.num_parts == 1:
            return self.exchange.own_tokens(x, metadata)
        sizes = [end - start for start, end in self._bounds(num_tokens)]
        return self.parts_group.all_gather_rows(x, sizes)

    def own_choices(
        self, ids_GK: torch.Tensor, metadata: ForwardMetaData
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what this rank brings, this DP rank's tokens: (ids [T, K], is it a real token [T]).

        Padding and the tokens of a dummy batch are not real.
        """
        is_real_T = metadata.prompt_len > 0
        if self.num_parts == 1:
            return self.exchange.own_tokens(ids_GK, metadata), is_real_T
        start, end = self._bounds(len(is_real_T))[self.part]
        return ids_GK, is_real_T[start:end]

    def max_brought(self, num_tokens: int, metadata: ForwardMetaData) -> int:
        """The largest G of any rank of the instance in this step."""
        if metadata.dp_num_tokens is None:
            return -(-num_tokens // self.num_parts)
        span = self.exchange.span
        counts = metadata.dp_num_tokens
        together = [sum(counts[i : i + span]) for i in range(0, len(counts), span)]
        return -(-max(together) // self.num_parts)

    def _bounds(self, num_tokens: int) -> list[tuple[int, int]]:
        size = -(-num_tokens // self.num_parts)
        return [
            (min(part * size, num_tokens), min((part + 1) * size, num_tokens))
            for part in range(self.num_parts)
        ]
