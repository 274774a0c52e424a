"""What one rank holds of a model: weights, KV cache, heads, experts. Torch-free.

A family's architecture knows its own shares (`num_parameters_of_rank(layout)`,
`kv_bytes_per_token_of_rank(dtype, layout)`); for one that does not, they are estimated. It may
tell the parts of the first (`parameter_parts_of_rank(layout)`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferkit.core.cache_spec import DTYPE_BYTES
from inferkit.core.parallel_layout import HeadLayout, ParallelLayout


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Share of the rank that holds most.

    Args:
        arch: what `parse_arch` of the model's family returned.
        dtype: "float32" and the like.
    """

    arch: Any
    layout: ParallelLayout
    dtype: str

    @property
    def num_parameters(self) -> int:
        of_rank = getattr(self.arch, "num_parameters_of_rank", None)
        if of_rank is not None:
            return int(of_rank(self.layout))
        # Experts lie on all ranks; rather too low than a refusal of what would run.
        num_shares = self.layout.world_size if self.num_experts else self.layout.attn_tp_size
        return -(-int(self.arch.num_parameters) // num_shares)

    @property
    def parameter_parts(self) -> Mapping[str, int]:
        """Part of the model -> weights of it; empty where the family does not say."""
        of_rank = getattr(self.arch, "parameter_parts_of_rank", None)
        return {} if of_rank is None else dict(of_rank(self.layout))

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        of_rank = getattr(self.arch, "kv_bytes_per_token_of_rank", None)
        if of_rank is not None:
            return int(of_rank(self.dtype, self.layout))
        whole, heads = int(self.arch.kv_bytes_per_token(self.dtype)), self.heads
        if heads is None:
            return whole
        return -(-whole * heads.num_local_kv_heads // heads.num_kv_heads)

    @property
    def heads(self) -> HeadLayout | None:
        """None = the family does not say how many it has."""
        num_heads = int(getattr(self.arch, "num_attention_heads", 0) or 0)
        num_kv_heads = int(getattr(self.arch, "num_key_value_heads", 0) or 0)
        if not num_heads or not num_kv_heads:
            return None
        return HeadLayout(
            num_heads=num_heads, num_kv_heads=num_kv_heads, tp_size=self.layout.attn_tp_size
        )

    @property
    def has_latent(self) -> bool:
        """Whether the cache stores one latent of all heads, which TP does not divide."""
        return bool(getattr(self.arch, "kv_lora_rank", 0))

    @property
    def num_experts(self) -> int:
        """Of the whole model; 0 = dense."""
        return num_experts(self.arch)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.layout.moe_ep_size


def num_experts(arch: Any) -> int:
    """Routed experts of a layer; 0 = dense."""
    return int(getattr(arch, "num_experts", 0) or 0)
