"""Attention over a cache: paged, or contiguous for models without a block manager.

Both store and read through the platform's cache, so a model written on either runs everywhere.
Legend: T = packed tokens, N = heads, D = head dim.
"""

from typing import Any

import torch
from torch import nn

from inferkit.core.cache_spec import CacheKind, CacheSpec
from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.layers.context import ModelContext
from inferkit.layers.context_parallel import write_and_attend

CONTIGUOUS_KEY = "contiguous"
"""Plan key of the contiguous cache: one block of full length per request."""


class Attention(nn.Module):
    """Causal attention with a paged cache, whose tensors the engine binds before the first step.

    `scale` multiplies the products of queries and keys (None = 1/sqrt(D)). `sinks` [N] is a
    parameter of the module around it, which loads it: one logit per query head that joins the
    softmax's denominator. `num_model_kv_heads` are those of the whole layer, without padding.
    """

    def __init__(
        self,
        *,
        layer_idx: int,
        num_kv_heads: int,
        head_dim: int,
        num_model_kv_heads: int | None = None,
        window: int | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        ctx: ModelContext,
    ) -> None:
        super().__init__()
        self.platform = ctx.platform
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        # A plain attribute: a parameter has one owner.
        self.sinks_N = None if sinks is None else sinks.data
        kind = CacheKind.FULL if window is None else CacheKind.SLIDING_WINDOW
        self.cache_spec = CacheSpec(
            layer_idx=layer_idx,
            kind=kind,
            manager_key=kind.value if window is None else f"{kind.value}_{window}",
            num_heads=num_kv_heads,
            dims=(head_dim, head_dim),
            dtype=ctx.dtype_name,
            block_size=ctx.block_size,
            window=window,
            num_model_heads=num_model_kv_heads,
        )
        self.k_cache: torch.Tensor | None = None
        self.v_cache: torch.Tensor | None = None

    @property
    def plan_key(self) -> str:
        return self.cache_spec.manager_key

    def forward(
        self,
        q_TND: torch.Tensor,
        k_TND: torch.Tensor,
        v_TND: torch.Tensor,
        forward_metadata: ForwardMetaData,
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend; returns [T, N, D]."""
        assert self.k_cache is not None and self.v_cache is not None, "the cache is not bound"
        plan = forward_metadata.attention_plans[self.plan_key]
        cache = (self.k_cache, self.v_cache)

        def attend(tokens: slice, cache: tuple[torch.Tensor, ...], plan: Any) -> torch.Tensor:
            return self.platform.cache.attend(
                q_TND[tokens],
                k_TND[tokens],
                v_TND[tokens],
                cache,
                plan,
                self.scale,
                self.sinks_N,
            )

        return write_and_attend(plan, self.platform.cache, cache, (k_TND, v_TND), attend)


class ContiguousAttention(Attention):
    """Legacy path: `ModelWorker.init_kvcache` allocates [rows, length, *cache_unit] per layer.

    Row `cache_rows[i]` of `k_cache` and `v_cache` holds request i from position 0 on; row 0
    belongs to nobody. Offline only, full attention only.
    """

    def __init__(self, *, window: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if window is not None:
            raise ValueError(
                f"layer {self.cache_spec.layer_idx} has a sliding window of {window} tokens, "
                "which the contiguous cache cannot keep; declare cache specs instead"
            )

    @property
    def cache_unit(self) -> tuple[int, int]:
        """(KV heads of this rank, head dim)."""
        return (self.num_kv_heads, self.head_dim)

    @property
    def plan_key(self) -> str:
        return CONTIGUOUS_KEY
