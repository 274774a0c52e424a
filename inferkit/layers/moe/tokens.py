"""Which tokens each rank brings to the experts, and how their results get back to everybody.

The ranks of an attention-TP group hold copies of one DP rank's tokens. The ranks of a
`moe_tp_group` hold slices of the same experts, so they must bring the same tokens:

    attn_tp = world, or moe_tp = world   every rank brings all tokens of the instance
    moe_tp >= attn_tp                    a group spans DP ranks and brings the tokens of all of them
    moe_tp <  attn_tp                    a group is one of several in an attention-TP group and
                                         brings its part of that one's tokens

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
        attn, moe, world = layout.attn_tp_size, layout.moe_tp_size, layout.world_size
        self.are_everywhere = world in (attn, moe)
        """Every rank brings all tokens, so that none must travel to its experts."""
        if not self.are_everywhere:
            ctx.comm.joins_dp_ranks = True
        self.num_parts = 1 if self.are_everywhere else max(1, attn // moe)
        attn_tp_rank, num_alike = layout.attn_tp_rank(ctx.comm.rank), attn // self.num_parts
        self.part = attn_tp_rank // num_alike
        self.is_first_of_alike = attn_tp_rank % num_alike == 0
        """Of the ranks that bring this DP rank's tokens, or this part of them, the first one."""
        self.parts_group = ctx.comm.register_group(
            "moe_parts_group",
            subgroups=[
                tuple(range(base + position, base + attn, num_alike))
                for base in range(0, world, attn)
                for position in range(num_alike)
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

    def max_brought(self, metadata: ForwardMetaData) -> int:
        """The largest G of any rank of the instance in this step, where tokens travel."""
        counts, span = metadata.dp_num_tokens, self.exchange.span
        assert counts is not None, "DP ranks that compute together exchange their row counts"
        together = [sum(counts[i : i + span]) for i in range(0, len(counts), span)]
        return -(-max(together) // self.num_parts)

    def _bounds(self, num_tokens: int) -> list[tuple[int, int]]:
        size = -(-num_tokens // self.num_parts)
        return [
            (min(part * size, num_tokens), min((part + 1) * size, num_tokens))
            for part in range(self.num_parts)
        ]
