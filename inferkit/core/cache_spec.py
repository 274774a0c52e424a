"""Declares the KV cache of one attention layer; a model returns one per layer."""

import math
from dataclasses import dataclass
from enum import StrEnum

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class CacheKind(StrEnum):
    FULL = "full_attention"
    SLIDING_WINDOW = "sliding_window"


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """KV cache of one layer. Layers with one `manager_key` share block tables.

    `dims` are the per-head sizes of the tensors that one token stores, in order: (head_dim,
    head_dim) for K and V.
    """

    layer_idx: int
    kind: CacheKind
    manager_key: str
    num_heads: int
    dims: tuple[int, ...]
    dtype: str
    block_size: int
    layout: str = "BnBsND"
    """Logical order of a physical buffer: block, token in block, head, dim."""
    window: int | None = None
    """Sliding window in tokens: a query sees itself and window - 1 tokens before it."""
    num_model_heads: int | None = None
    """Of the layer over all ranks, without padding and replicas; 1 for latents. None = not told,
    which is enough for one instance but not for a hand-off between two."""

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * sum(self.dims) * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


def window_blocks(window: int, block_size: int) -> int:
    """Blocks that a window can touch, wherever it starts."""
    return math.ceil(window / block_size) + 1
