"""A model that declares no cache spec: its attention layers have a `cache_unit` instead."""

from inferkit.core.cache_spec import CacheSpec
from inferkit.layers.attention import Attention, ContiguousAttention
from inferkit.layers.context import ModelContext
from inferkit.models.dense.arch import DenseArch
from inferkit.models.dense.model import DenseAttention, DenseForCausalLM, DenseLayer


class LegacyAttention(DenseAttention):
    def make_attention(self, arch: DenseArch, layer_idx: int, ctx: ModelContext) -> Attention:
        return ContiguousAttention(
            layer_idx=layer_idx,
            num_kv_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            window=arch.layer_windows[layer_idx],
            ctx=ctx,
        )


class LegacyLayer(DenseLayer):
    attention_class = LegacyAttention


class LlamaForCausalLM(DenseForCausalLM):
    layer_class = LegacyLayer

    def cache_specs(self) -> list[CacheSpec] | None:
        return None
