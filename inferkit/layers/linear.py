"""Linear layers. The constructor does the sharding arithmetic, the parameter loads itself.

A rank holds its share of the output (column parallel) or of the input (row parallel), padded with
zeros to equal shares, and reads nothing else of the checkpoint.
Legend: T = packed tokens, K = input size, N = output size, H = hidden size, D = head dim.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.core.parallel_layout import HeadLayout, local_size
from inferkit.layers.context import ModelContext
from inferkit.layers.token_exchange import TokenExchange
from inferkit.layers.weights import StoredTensor, load_slice

WeightLoader = Callable[[torch.Tensor, StoredTensor, str | None], None]


class Linear(nn.Module):
    """y = x @ weight.T + bias; weight [N, K], the same on every rank."""

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

    def set_loader(self, weight_loader: WeightLoader) -> None:
        for parameter in self.parameters():
            parameter.weight_loader = weight_loader  # type: ignore[attr-defined]

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self.platform.linear(x_TK, self.weight, self.bias)


class MergedColumnParallelLinear(Linear):
    """Several layers over one input as one product, each split by output, e.g. gate and up.

    `shard_sizes` names the outputs in order with their whole sizes; a checkpoint tensor goes to
    the shard of its name.
    """

    def __init__(
        self,
        input_size: int,
        shard_sizes: Mapping[str, int],
        *,
        bias: bool = False,
        kind: str,
        ctx: ModelContext,
    ) -> None:
        group = ctx.comm.group(f"{kind}_tp_group")
        self.tp_rank, tp_size = group.rank, group.size
        self.shard_sizes = {name: local_size(size, tp_size) for name, size in shard_sizes.items()}
        super().__init__(input_size, sum(self.shard_sizes.values()), bias=bias, ctx=ctx)
        self.set_loader(self._load_shard)

    def _load_shard(
        self, parameter: torch.Tensor, stored: StoredTensor, shard_id: str | None
    ) -> None:
        assert shard_id in self.shard_sizes, f"no shard {shard_id!r} in {self.shard_sizes}"
        start = 0
        for name, size in self.shard_sizes.items():
            if name == shard_id:
                target = parameter[start : start + size]
                load_slice(target, stored, dim=0, start=self.tp_rank * size)
            start += size


class ColumnParallelLinear(Linear):
    """Split by output: a rank computes [T, N / tp] of the result."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        kind: str,
        ctx: ModelContext,
    ) -> None:
        group = ctx.comm.group(f"{kind}_tp_group")
        self.tp_rank = group.rank
        self.local_size = local_size(output_size, group.size)
        super().__init__(input_size, self.local_size, bias=bias, ctx=ctx)
        self.set_loader(self._load)

    def _load(self, parameter: torch.Tensor, stored: StoredTensor, shard_id: str | None) -> None:
        load_slice(parameter, stored, dim=0, start=self.tp_rank * self.local_size)


class RowParallelLinear(Linear):
    """Split by input: the partial results are summed over the group, the bias added once."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        kind: str,
        ctx: ModelContext,
    ) -> None:
        self.group = ctx.comm.group(f"{kind}_tp_group")
        self.local_size = local_size(input_size, self.group.size)
        super().__init__(self.local_size, output_size, bias=bias, ctx=ctx)
        self.weight.weight_loader = self._load  # type: ignore[attr-defined]

    def _load(self, parameter: torch.Tensor, stored: StoredTensor, shard_id: str | None) -> None:
        load_slice(parameter, stored, dim=1, start=self.group.rank * self.local_size)

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        return reduced_linear(self, x_TK)


def reduced_linear(
    layer: "RowParallelLinear | OutputProjection", x_TK: torch.Tensor
) -> torch.Tensor:
    """The product summed over the layer's group, plus its bias."""
    if layer.group.size == 1:
        return layer.platform.linear(x_TK, layer.weight, layer.bias)
    out = layer.group.all_reduce(layer.platform.linear(x_TK, layer.weight, None))
    return out if layer.bias is None else out.add_(layer.bias)


class QKVParallelLinear(Linear):
    """q, k and v of this rank's heads as one product: [T, (Nq + 2 Nkv) * D] in that order."""

    def __init__(
        self,
        hidden_size: int,
        heads: HeadLayout,
        head_dim: int,
        *,
        bias: bool = False,
        ctx: ModelContext,
    ) -> None:
        tp_rank = ctx.comm.group("attn_tp_group").rank
        q_heads, kv_heads = heads.heads(tp_rank), heads.kv_heads(tp_rank)
        num_q, num_kv = len(q_heads), len(kv_heads)
        super().__init__(hidden_size, (num_q + 2 * num_kv) * head_dim, bias=bias, ctx=ctx)
        self.head_dim = head_dim
        self.shards = {
            "q": (0, q_heads),
            "k": (num_q, kv_heads),
            "v": (num_q + num_kv, kv_heads),
        }
        self.set_loader(self._load_shard)

    def _load_shard(
        self, parameter: torch.Tensor, stored: StoredTensor, shard_id: str | None
    ) -> None:
        assert shard_id in self.shards, f"no shard {shard_id!r} in {list(self.shards)}"
        first, heads = self.shards[shard_id]
        target = parameter[first * self.head_dim : (first + len(heads)) * self.head_dim]
        load_heads(target, stored, heads, self.head_dim, dim=0)


class OutputProjection(Linear):
    """The projection after attention: input [T, heads of this rank * D], output [T, H].

    Its TP group may be narrower than the attention's (a rank then needs the heads of several) or
    wider (then it has a part of its heads' columns, and tokens of other DP ranks).
    """

    def __init__(
        self,
        heads: HeadLayout,
        head_dim: int,
        hidden_size: int,
        *,
        bias: bool = False,
        ctx: ModelContext,
    ) -> None:
        self.attn_group = ctx.comm.group("attn_tp_group")
        self.group = ctx.comm.group("o_proj_tp_group")
        self.exchange = TokenExchange("o_proj", ctx)
        attn_rank, num_joined = self.attn_group.rank, self.attn_group.size // self.group.size
        self.is_narrow = num_joined > 1
        if self.is_narrow:
            # [heads of rank 0 | heads of rank 1 | ...] of the attention group; this rank's share.
            first = self.group.rank * num_joined
            held = [head for rank in range(first, first + num_joined) for head in heads.heads(rank)]
        else:
            held = heads.heads(attn_rank)
        self.head_dim = head_dim
        self.heads = held
        columns = len(held) * head_dim
        self.local_size = local_size(columns, self.exchange.span)
        self.start = self.exchange.position * self.local_size
        super().__init__(self.local_size, hidden_size, bias=bias, ctx=ctx)
        self.weight.weight_loader = self._load  # type: ignore[attr-defined]

    def _load(self, parameter: torch.Tensor, stored: StoredTensor, shard_id: str | None) -> None:
        load_heads(parameter, stored, self.heads, self.head_dim, dim=1, start=self.start)

    def forward(self, x_TK: torch.Tensor, metadata: ForwardMetaData) -> torch.Tensor:  # type: ignore[override]
        if self.is_narrow:
            x_TK = self.attn_group.all_gather(x_TK, dim=1)
            x_TK = x_TK.narrow(1, self.group.rank * self.local_size, self.local_size)
        if self.exchange.span == 1:
            return reduced_linear(self, x_TK)
        x_TK = self.exchange.gather_tokens(x_TK, metadata)
        x_TK = x_TK[:, self.start : self.start + self.local_size]
        if x_TK.shape[1] < self.local_size:
            x_TK = nn.functional.pad(x_TK, (0, self.local_size - x_TK.shape[1]))
        return self.exchange.own_tokens(reduced_linear(self, x_TK), metadata)


def head_runs(heads: Sequence[int | None], head_dim: int) -> Iterator[tuple[int, int, int]]:
    """(local start, stored start, length) of the columns of adjacent heads; padding left out."""
    run: tuple[int, int, int] | None = None
    for idx, head in enumerate(heads):
        if head is None:
            continue
        local, stored = idx * head_dim, head * head_dim
        if run is not None and run[0] + run[2] == local and run[1] + run[2] == stored:
            run = (run[0], run[1], run[2] + head_dim)
            continue
        if run is not None:
            yield run
        run = (local, stored, head_dim)
    if run is not None:
        yield run


def load_heads(
    target: torch.Tensor,
    stored: StoredTensor,
    heads: Sequence[int | None],
    head_dim: int,
    *,
    dim: int,
    start: int = 0,
) -> None:
    """Fill `target` along `dim` with the columns [start, start + size) of these heads' columns.

    Columns of padded heads (None), and those beyond the last head, become zero.
    """
    size = target.shape[dim]
    target.data.zero_()
    for local, source, length in head_runs(heads, head_dim):
        first, last = max(local, start), min(local + length, start + size)
        if first >= last:
            continue
        source += first - local
        part = target.narrow(dim, first - start, last - first)
        load_slice(part, stored, dim=dim, start=source)
