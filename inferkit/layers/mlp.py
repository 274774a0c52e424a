"""The gated feed-forward network of a dense layer, or of a shared expert."""

import torch
from torch import nn

from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.layers.context import ModelContext
from inferkit.layers.functional import Activation, silu_and_mul
from inferkit.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from inferkit.layers.token_exchange import TokenExchange


class GatedMLP(nn.Module):
    """down(activation(gate(x), up(x))), split over `<kind>_tp_group`.

    The activation is silu(gate) * up unless said otherwise (SwiGLU, arXiv 2002.05202).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        kind: str = "dense",
        activation: Activation = silu_and_mul,
        ctx: ModelContext,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.exchange = TokenExchange(kind, ctx)
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            {"gate": intermediate_size, "up": intermediate_size},
            bias=bias,
            kind=kind,
            ctx=ctx,
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias=bias, kind=kind, ctx=ctx
        )

    def forward(self, x_TH: torch.Tensor, forward_metadata: ForwardMetaData) -> torch.Tensor:
        x_TH = self.exchange.gather_tokens(x_TH, forward_metadata)
        x_TH = self.down_proj(self.activation(self.gate_up_proj(x_TH)))
        return self.exchange.own_tokens(x_TH, forward_metadata)
