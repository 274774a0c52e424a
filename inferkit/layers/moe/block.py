"""A mixture-of-experts layer over any split: tensor parallel, expert parallel, and both.

A family gives the router; this layer brings tokens and experts together. With one expert group
(`moe_ep_size` 1) every rank has a slice of all experts, else some experts whole or in slices.
Where every rank has all tokens, it computes those of its experts and one sum over all ranks
follows; else tokens travel to their experts and back (dispatch.py).
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.layers.context import ModelContext
from inferkit.layers.functional import Activation, silu_and_mul
from inferkit.layers.moe.balance import ExpertLoad, balanced_ids
from inferkit.layers.moe.dispatch import run_exact, run_fixed, run_local
from inferkit.layers.moe.experts import LocalExperts
from inferkit.layers.moe.tokens import MoETokens


class ExpertParallelMoE(nn.Module, ABC):
    """Routed experts of one layer. A subclass has the router, equal on every rank, in `route`.

    Building one is collective.
    """

    experts_class: ClassVar[type[LocalExperts]] = LocalExperts

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: Activation = silu_and_mul,
        ctx: ModelContext,
    ) -> None:
        super().__init__()
        self.ep_group = ctx.comm.group("moe_ep_group")
        self.fixed_group = ctx.comm.group("moe_ep_group_mc2")
        self.tp_group = ctx.comm.group("moe_tp_group")
        # Where tokens are everywhere, one of the two groups has all ranks.
        self.widest_group = max(
            self.tp_group, ctx.comm.group("attn_tp_group"), key=lambda group: group.size
        )
        self.tokens = MoETokens(ctx)
        self.force_eplb = ctx.force_eplb
        self.load = ExpertLoad(
            num_experts, answers=self.tokens.is_first_of_alike, device=ctx.platform.device
        )
        self.experts = self.experts_class(
            num_experts,
            hidden_size,
            intermediate_size,
            bias=bias,
            activation=activation,
            ctx=ctx,
        )

    @abstractmethod
    def route(self, x_GH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights [G, K] float32, expert ids [G, K] int64) of tokens; G may be 0.

        Ranks that bring the same tokens must choose the same.
        """

    def forward(self, x_TH: torch.Tensor, metadata: ForwardMetaData) -> torch.Tensor:
        """[T, H] -> [T, H]. Every rank must enter, with at least one token."""
        x_GH = self.tokens.bring(x_TH, metadata)
        weights_GK, ids_GK = self.route(x_GH)
        if self.force_eplb:
            ids_GK = balanced_ids(
                ids_GK,
                num_experts=self.load.num_experts,
                ep_size=self.ep_group.size,
                ep_rank=0 if self.tokens.are_everywhere else self.ep_group.rank,
                is_prefill=metadata.dp_is_prefill,
            )
        if not metadata.is_warm_up:
            self.load.add(*self.tokens.own_choices(ids_GK, metadata))
        out_GH = self._compute(x_GH, weights_GK, ids_GK, metadata)
        return self.tokens.take(out_GH, len(x_TH), metadata)

    def _compute(
        self,
        x_GH: torch.Tensor,
        weights_GK: torch.Tensor,
        ids_GK: torch.Tensor,
        metadata: ForwardMetaData,
    ) -> torch.Tensor:
        """[G, H] weighted sum over each token's experts, wherever these are."""
        if self.tokens.are_everywhere:
            out_GH = run_local(x_GH, weights_GK, ids_GK, self.experts)
            return self.widest_group.all_reduce(out_GH)
        if metadata.dp_is_prefill:
            out_GH = run_exact(x_GH, weights_GK, ids_GK, self.experts, self.ep_group)
        else:
            max_tokens = self.tokens.max_brought(metadata)
            out_GH = run_fixed(x_GH, weights_GK, ids_GK, self.experts, self.fixed_group, max_tokens)
        return self.tp_group.all_reduce(out_GH)
