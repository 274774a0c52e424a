"""Paged KV cache and attention over it, in plain torch operators.

Legend: T = packed query tokens, R = rows (requests), Nq / Nk = query / KV heads, D = head dim,
B = blocks, S = tokens per block, L = gathered KV tokens, G = Nq / Nk.

A step is planned once for all layers. Its rows fall into three kinds:

    fresh      q > 1, nothing computed before     causal over the step's own keys
    context    q > 1, some KV in the cache        [cached keys | the step's own keys]
    decode     q = 1                              keys of the cache, this token's included

Own keys never travel through the cache, so tokens that a sliding window will not need again may be
written to the null block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from inferkit.core.cache_spec import CacheSpec
from inferkit.platforms.paged_latent import attend_latent
from inferkit.platforms.sinks import attend_with_sinks

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MIN_FILL = 0.5
"""Rows are gathered together while the shortest sees this share of the longest's keys."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FreshRows:
    """Rows of equal length; `tokens` is [n * q] packed indices, or a slice if they are adjacent."""

    tokens: torch.Tensor | slice
    num_rows: int
    bias: torch.Tensor | None
    """[q, q] additive mask; None = plain causal."""


@dataclass(frozen=True)
class ContextRow:
    tokens: slice
    context_slots: torch.Tensor
    """[C] slots of the cached keys that some query of the row sees."""
    bias: torch.Tensor
    """[q, C + q] additive mask."""


@dataclass(frozen=True)
class DecodeRows:
    tokens: torch.Tensor
    """[n] packed indices."""
    slots: torch.Tensor
    """[n * L] slots of the visible keys of each row, in order."""
    bias: torch.Tensor
    """[n, 1, 1, L] additive mask of the tails of shorter rows."""


@dataclass(frozen=True)
class AttentionPlan:
    """What all layers of one manager key share in a step."""

    slots: torch.Tensor
    """[T] where each token's KV is written."""
    fresh: Sequence[FreshRows]
    context: Sequence[ContextRow]
    decode: Sequence[DecodeRows]


class PagedCache:
    """The only place that knows the physical layout: [B, S, heads, dim] per tensor."""

    def __init__(self, *, device: torch.device) -> None:
        self.device = device

    def allocate(
        self, spec: CacheSpec, num_blocks: int, buffer: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Zeroed tensors [num_blocks, block_size, num_heads, dim], one per entry of `spec.dims`.

        `buffer` is zeroed uint8 memory of at least `num_blocks * spec.bytes_per_block` bytes to lay
        them into (memory that a transfer engine shares); None = new memory. It is not touched: on
        a CPU, memory that was not written costs nothing.
        """
        num_bytes = num_blocks * spec.bytes_per_block
        if buffer is None:
            # On a CPU numpy's zeros cost no memory until they are written; torch's do.
            buffer = torch.from_numpy(np.zeros(num_bytes, np.uint8)).to(self.device)
        elif buffer.dtype is not torch.uint8 or buffer.numel() < num_bytes:
            raise ValueError(
                f"layer {spec.layer_idx} needs {num_bytes} bytes (uint8) of cache memory, "
                f"the buffer has {buffer.numel()} ({buffer.dtype})"
            )
        dtype = TORCH_DTYPES[spec.dtype]
        tensors = []
        start = 0
        for dim in spec.dims:
            shape = (num_blocks, spec.block_size, spec.num_heads, dim)
            end = start + int(np.prod(shape)) * dtype.itemsize
            tensors.append(buffer[start:end].view(dtype).view(shape))
            start = end
        return tuple(tensors)

    def write(
        self,
        cache: tuple[torch.Tensor, ...],
        values: tuple[torch.Tensor, ...],
        slots_T: torch.Tensor,
    ) -> None:
        """Store each token's tensors [T, heads, dim] at its slot."""
        for tensor, value in zip(cache, values, strict=True):
            tensor.view(-1, *tensor.shape[2:]).index_copy_(0, slots_T, value)

    def plan(
        self,
        *,
        dtype: str,
        block_size: int,
        window: int | None,
        q_lens: Ints,
        kv_lens: Ints,
        block_table: npt.NDArray[np.int32],
        slots: torch.Tensor,
    ) -> AttentionPlan:
        """Derive once per step what every layer needs.

        Args:
            q_lens, kv_lens: [R] query tokens and visible KV of each row.
            block_table: [R, W] on the host.
        """
        starts = np.cumsum(q_lens) - q_lens
        computed = kv_lens - q_lens
        planner = _Planner(self.device, TORCH_DTYPES[dtype], block_size, window)
        is_decode = q_lens == 1
        fresh = np.flatnonzero(~is_decode & (computed == 0))
        context = np.flatnonzero(~is_decode & (computed > 0))
        return AttentionPlan(
            slots=slots,
            fresh=planner.fresh(fresh, starts, q_lens),
            context=[
                planner.context_row(
                    int(starts[i]), int(q_lens[i]), int(computed[i]), block_table[i]
                )
                for i in context
            ],
            decode=planner.decode(np.flatnonzero(is_decode), starts, kv_lens, block_table),
        )

    def attend(
        self,
        q_TND: torch.Tensor,
        k_TND: torch.Tensor,
        v_TND: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        plan: AttentionPlan,
        scale: float,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the step's queries; returns [T, Nq, D]. `write` comes before it.

        `sinks_N` [Nq] has a logit of each query head that joins its softmax's denominator.
        """
        k_cache, v_cache = cache
        out = torch.empty_like(q_TND)
        for rows in plan.fresh:
            out[rows.tokens] = _attend_fresh(
                q_TND[rows.tokens], k_TND[rows.tokens], v_TND[rows.tokens], rows, scale, sinks_N
            )
        for row in plan.context:
            out[row.tokens] = _attend_context(
                q_TND[row.tokens],
                torch.cat((_gather(k_cache, row.context_slots), k_TND[row.tokens])),
                torch.cat((_gather(v_cache, row.context_slots), v_TND[row.tokens])),
                row.bias,
                scale,
                sinks_N,
            )
        for group in plan.decode:
            if len(group.tokens) == len(q_TND):
                return _attend_decode(q_TND, k_cache, v_cache, group, scale, sinks_N)
            out[group.tokens] = _attend_decode(
                q_TND[group.tokens], k_cache, v_cache, group, scale, sinks_N
            )
        return out

    def attend_latent(
        self,
        q_TNQ: torch.Tensor,
        latent_T1C: torch.Tensor,
        rope_T1P: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        cache: tuple[torch.Tensor, ...],
        plan: AttentionPlan,
        scale: float,
    ) -> torch.Tensor:
        """The same for latent attention; returns [T, N, V]. See paged_latent.py."""
        return attend_latent(q_TNQ, latent_T1C, rope_T1P, weights, cache, plan, scale)


def _gather(tensor: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, *tensor.shape[2:]).index_select(0, slots)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    bias: torch.Tensor | None,
    is_causal: bool = False,
    scale: float,
) -> torch.Tensor:
    """Of [rows, heads, tokens, D] tensors; `sinks` broadcasts to [heads, queries]."""
    if sinks is not None:
        return attend_with_sinks(q, k, v, sinks, bias=bias, is_causal=is_causal, scale=scale)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=bias,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _attend_fresh(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: FreshRows,
    scale: float,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    def split(x: torch.Tensor) -> torch.Tensor:
        return x.view(rows.num_rows, -1, *x.shape[1:]).transpose(1, 2)

    out = _attend(
        split(q),
        split(k),
        split(v),
        None if sinks_N is None else sinks_N[:, None],
        bias=rows.bias,
        is_causal=rows.bias is None,
        scale=scale,
    )
    return out.transpose(1, 2).reshape(q.shape)


def _attend_context(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    out = _attend(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        None if sinks_N is None else sinks_N[:, None],
        bias=bias,
        scale=scale,
    )
    return out[0].transpose(0, 1)


def _attend_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group: DecodeRows,
    scale: float,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    """The G query heads of a KV head stand in for G queries: keys are read once, not G times."""
    num_rows, num_kv_heads = len(group.tokens), k_cache.shape[2]

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        return _gather(tensor, group.slots).view(num_rows, -1, *tensor.shape[2:]).transpose(1, 2)

    out = _attend(
        q.view(num_rows, num_kv_heads, -1, q.shape[-1]),
        gather(k_cache),
        gather(v_cache),
        None if sinks_N is None else sinks_N.view(num_kv_heads, -1),
        bias=group.bias,
        scale=scale,
    )
    return out.reshape(q.shape)


class _Planner:
    def __init__(
        self, device: torch.device, dtype: torch.dtype, block_size: int, window: int | None
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.block_size = block_size
        self.window = window

    def fresh(self, rows: Ints, starts: Ints, q_lens: Ints) -> list[FreshRows]:
        groups = []
        for q_len in np.unique(q_lens[rows]):
            members = starts[rows[q_lens[rows] == q_len]]
            tokens: torch.Tensor | slice
            if len(members) == 1 or (np.diff(members) == q_len).all():
                tokens = slice(int(members[0]), int(members[-1] + q_len))
            else:
                tokens = self._tensor((members[:, None] + np.arange(q_len)).ravel())
            bias = None
            if self.window is not None and self.window < q_len:
                positions = np.arange(q_len)
                bias = self._bias(self._visible(positions, positions))
            groups.append(FreshRows(tokens, len(members), bias))
        return groups

    def context_row(
        self, start: int, q_len: int, computed: int, table: npt.NDArray[np.int32]
    ) -> ContextRow:
        first = 0 if self.window is None else max(0, computed - self.window + 1)
        context = np.arange(first, computed)
        block_ids = table[context // self.block_size].astype(np.int64)
        queries = np.arange(computed, computed + q_len)
        return ContextRow(
            slice(start, start + q_len),
            self._tensor(block_ids * self.block_size + context % self.block_size),
            self._bias(self._visible(queries, np.concatenate((context, queries)))),
        )

    def decode(
        self, rows: Ints, starts: Ints, kv_lens: Ints, block_table: npt.NDArray[np.int32]
    ) -> list[DecodeRows]:
        kv_lens = kv_lens[rows]
        first = np.zeros_like(kv_lens)
        if self.window is not None:
            first = np.maximum(0, kv_lens - self.window)
        lens = kv_lens - first
        order = np.argsort(-lens, kind="stable")
        groups = []
        while len(order):
            longest = int(lens[order[0]])
            size = int((lens[order] >= MIN_FILL * longest).sum())
            members, order = np.sort(order[:size]), order[size:]
            positions = first[members, None] + np.arange(longest)
            visible = positions < kv_lens[members, None]
            # Positions beyond a row's end are masked; its last token stands in for them.
            positions = np.minimum(positions, kv_lens[members, None] - 1)
            block_ids = np.take_along_axis(
                block_table[rows[members]].astype(np.int64), positions // self.block_size, axis=1
            )
            slots = block_ids * self.block_size + positions % self.block_size
            groups.append(
                DecodeRows(
                    self._tensor(starts[rows[members]]),
                    self._tensor(slots.ravel()),
                    self._bias(visible)[:, None, None, :],
                )
            )
        return groups

    def _visible(self, queries: Ints, keys: Ints) -> npt.NDArray[np.bool_]:
        """[q, k]: causal, and within the window if there is one."""
        visible: npt.NDArray[np.bool_] = keys[None, :] <= queries[:, None]
        if self.window is not None:
            visible &= keys[None, :] > queries[:, None] - self.window
        return visible

    def _bias(self, visible: npt.NDArray[np.bool_]) -> torch.Tensor:
        bias = torch.zeros(visible.shape, dtype=self.dtype)
        bias.masked_fill_(torch.from_numpy(~visible), float("-inf"))
        return bias.to(self.device)

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
