"""Linear layers. The constructor does the sharding arithmetic, the parameter loads itself.

Legend: T = packed tokens, K = input size, N = output size.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from inferkit.layers.context import ModelContext

WeightLoader = Callable[[torch.Tensor, str | None], None]


class Linear(nn.Module):
    """y = x @ weight.T + bias; weight [N, K]."""

    def __init__(
        self, input_size: int, output_size: int, *, bias: bool = False, ctx: ModelContext
    ) -> None:
        super().__init__()
        self.platform = ctx.platform
        self.weight: torch.Tensor = ctx.empty(output_size, input_size)
        self.bias: torch.Tensor | None = ctx.empty(output_size) if bias else None

    def pack(self) -> None:
        """Exchange the weight for the device's own layout, after loading; the plain one goes."""
        packed = self.platform.pack_weight(self.weight)
        if packed is not self.weight:
            del self.weight
            self.weight = packed

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self.platform.linear(x_TK, self.weight, self.bias)


class MergedLinear(Linear):
    """Several linear layers over one input as one product, for instance q, k, v or gate, up.

    `shard_sizes` names the outputs in order; a checkpoint tensor goes to the shard of its name.
    """

    def __init__(
        self,
        input_size: int,
        shard_sizes: Mapping[str, int],
        *,
        bias: bool = False,
        ctx: ModelContext,
    ) -> None:
        super().__init__(input_size, sum(shard_sizes.values()), bias=bias, ctx=ctx)
        self.shard_sizes = dict(shard_sizes)
        for parameter in self.parameters():
            parameter.weight_loader = self._load_shard  # type: ignore[attr-defined]

    def _load_shard(
        self, parameter: torch.Tensor, tensor: torch.Tensor, shard_id: str | None
    ) -> None:
        assert shard_id in self.shard_sizes, f"no shard {shard_id!r} in {self.shard_sizes}"
        start = 0
        for name, size in self.shard_sizes.items():
            if name == shard_id:
                parameter.data[start : start + size].copy_(tensor)
            start += size


class LMHead(Linear):
    """Hidden states to float32 logits; shares the embedding's parameter where they are tied."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tied_weight: torch.Tensor | None = None,
        ctx: ModelContext,
    ) -> None:
        super().__init__(hidden_size, 0 if tied_weight is not None else vocab_size, ctx=ctx)
        if tied_weight is not None:
            # A plain attribute: the parameter belongs to the embedding, which loads it.
            del self.weight
            self.weight = tied_weight.data

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        return super().forward(x_TK).float()
