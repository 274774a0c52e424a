"""Layers of latent attention (MLA): projections by head, and the attention itself.

A rank has the heads of its share and, as every rank of its attention group, the whole cache: one
latent and one rotated key part per token serve all heads.
Legend: T = packed tokens, K = input size, N = heads of this rank, C = latent size, P = rotated
part of a head, D = the rest of it, Q = D + P, V = value size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from inferkit.core.cache_spec import CacheKind, CacheSpec
from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.layers.context import ModelContext
from inferkit.layers.context_parallel import write_and_attend
from inferkit.layers.linear import Linear, load_heads
from inferkit.layers.weights import StoredTensor


class HeadParallelLinear(Linear):
    """[T, K] -> [T, heads * head size]: the outputs of some heads, of which None is padding.

    `interleaved` is the size of the last part of each head that the checkpoint has as rotary pairs
    side by side; it is held as two halves, which is what `apply_rotary` takes. Queries and keys
    are reordered alike, so their products stay what they are.
    """

    def __init__(
        self,
        input_size: int,
        heads: Sequence[int | None],
        head_size: int,
        *,
        interleaved: int = 0,
        bias: bool = False,
        ctx: ModelContext,
    ) -> None:
        super().__init__(input_size, len(heads) * head_size, bias=bias, ctx=ctx)
        self.heads = list(heads)
        self.head_size = head_size
        self.interleaved = interleaved
        self.set_loader(self._load)

    def _load(self, parameter: torch.Tensor, stored: StoredTensor, shard_id: str | None) -> None:
        load_heads(parameter, stored, self.heads, self.head_size, dim=0)
        if self.interleaved:
            of_head = parameter.data.unflatten(0, (len(self.heads), self.head_size))
            pairs = of_head[:, self.head_size - self.interleaved :]
            pairs.copy_(torch.cat((pairs[:, 0::2], pairs[:, 1::2]), dim=1))


class LatentExpansion(HeadParallelLinear):
    """The projection of a latent to the key (D) and value of each head; the attention applies it.

    Some steps multiply by its two parts head by head, so each part is kept plain and contiguous.
    """

    def __init__(
        self,
        latent_size: int,
        heads: Sequence[int | None],
        key_size: int,
        value_size: int,
        *,
        ctx: ModelContext,
    ) -> None:
        super().__init__(latent_size, heads, key_size + value_size, ctx=ctx)
        self.key_size = key_size
        self._parts: tuple[torch.Tensor, torch.Tensor] | None = None

    def pack(self) -> None:
        """Divide the weight; the whole one goes."""
        w_k_NDC, w_v_NVC = self.weights
        self._parts = (w_k_NDC.contiguous(), w_v_NVC.contiguous())
        del self.weight

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, D, C] of the keys and [N, V, C] of the values."""
        if self._parts is not None:
            return self._parts
        of_head = self.weight.detach().view(len(self.heads), self.head_size, -1)
        return of_head[:, : self.key_size], of_head[:, self.key_size :]


class LatentAttention(nn.Module):
    """Causal attention over cached latents; the engine binds the cache before the first step."""

    def __init__(
        self,
        *,
        layer_idx: int,
        latent_size: int,
        rope_size: int,
        scale: float,
        ctx: ModelContext,
    ) -> None:
        super().__init__()
        self.platform = ctx.platform
        self.scale = scale
        self.cache_spec = CacheSpec(
            layer_idx=layer_idx,
            kind=CacheKind.FULL,
            manager_key=CacheKind.FULL.value,
            num_heads=1,
            dims=(latent_size, rope_size),
            dtype=ctx.dtype_name,
            block_size=ctx.block_size,
            num_model_heads=1,
        )
        self.k_cache: torch.Tensor | None = None
        """Latents."""
        self.v_cache: torch.Tensor | None = None
        """Rotated key parts."""

    def forward(
        self,
        q_TNQ: torch.Tensor,
        latent_T1C: torch.Tensor,
        rope_T1P: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        forward_metadata: ForwardMetaData,
    ) -> torch.Tensor:
        """Write this step's latents and rotated parts, then attend; returns [T, N, V].

        `weights` are those of the `LatentExpansion`.
        """
        assert self.k_cache is not None and self.v_cache is not None, "the cache is not bound"
        plan = forward_metadata.attention_plans[self.cache_spec.manager_key]
        paged = self.platform.cache

        def attend(tokens: slice, cache: tuple[torch.Tensor, ...], plan: Any) -> torch.Tensor:
            return paged.attend_latent(
                q_TNQ[tokens],
                latent_T1C[tokens],
                rope_T1P[tokens],
                weights,
                cache,
                plan,
                self.scale,
            )

        cache = (self.k_cache, self.v_cache)
        return write_and_attend(plan, paged, cache, (latent_T1C, rope_T1P), attend)
