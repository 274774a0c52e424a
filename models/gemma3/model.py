"""Gemma-3, text only: layers with a sliding window between layers with full attention.

Both kinds have rotary angles of their own; a norm stands before and after attention and MLP; the
embeddings are scaled. Legend: T = packed tokens, H = hidden size, N = heads, D = head dim,
S = sampled rows, V = vocabulary.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from inferkit.core.cache_spec import CacheSpec
from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.layers.attention import Attention
from inferkit.layers.context import ModelContext
from inferkit.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from inferkit.layers.functional import (
    apply_rotary,
    expand_rotary,
    gelu_tanh_and_mul,
    sampled_rows,
)
from inferkit.layers.linear import OutputProjection, QKVParallelLinear
from inferkit.layers.mlp import GatedMLP
from inferkit.layers.norm import UnitOffsetRMSNorm
from inferkit.layers.rotary import RotaryEmbedding
from inferkit.models.gemma3.arch import Gemma3Arch

Rotary = tuple[torch.Tensor, torch.Tensor]

LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class Gemma3Attention(nn.Module):
    def __init__(self, arch: Gemma3Arch, layer_idx: int, ctx: ModelContext) -> None:
        super().__init__()
        heads = arch.heads(ctx.comm.layout)
        self.num_heads = heads.num_local_heads
        self.num_kv_heads = heads.num_local_kv_heads
        self.head_dim = arch.head_dim
        self.qkv_proj = QKVParallelLinear(
            arch.hidden_size, heads, arch.head_dim, bias=arch.attention_bias, ctx=ctx
        )
        self.o_proj = OutputProjection(
            heads, arch.head_dim, arch.hidden_size, bias=arch.attention_bias, ctx=ctx
        )
        self.q_norm = UnitOffsetRMSNorm(arch.head_dim, arch.rms_norm_eps, ctx=ctx)
        self.k_norm = UnitOffsetRMSNorm(arch.head_dim, arch.rms_norm_eps, ctx=ctx)
        self.attention = Attention(
            layer_idx=layer_idx,
            num_kv_heads=self.num_kv_heads,
            num_model_kv_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            window=arch.layer_windows[layer_idx],
            scale=arch.query_pre_attn_scalar**-0.5,
            ctx=ctx,
        )

    def forward(
        self, x_TH: torch.Tensor, rotary: Rotary, forward_metadata: ForwardMetaData
    ) -> torch.Tensor:
        qkv_TND = self.qkv_proj(x_TH).view(len(x_TH), -1, self.head_dim)
        q, k, v = qkv_TND.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q = apply_rotary(self.q_norm(q), *rotary)
        k = apply_rotary(self.k_norm(k), *rotary)
        out_TND = self.attention(q, k, v, forward_metadata)
        out_TH: torch.Tensor = self.o_proj(out_TND.reshape(len(x_TH), -1), forward_metadata)
        return out_TH


class Gemma3Layer(nn.Module):
    def __init__(self, arch: Gemma3Arch, layer_idx: int, ctx: ModelContext) -> None:
        super().__init__()
        self.layer_type = arch.layer_types[layer_idx]
        self.self_attn = Gemma3Attention(arch, layer_idx, ctx)
        self.mlp = GatedMLP(
            arch.hidden_size, arch.intermediate_size, activation=gelu_tanh_and_mul, ctx=ctx
        )
        size, eps = arch.hidden_size, arch.rms_norm_eps
        self.input_layernorm = UnitOffsetRMSNorm(size, eps, ctx=ctx)
        self.post_attention_layernorm = UnitOffsetRMSNorm(size, eps, ctx=ctx)
        self.pre_feedforward_layernorm = UnitOffsetRMSNorm(size, eps, ctx=ctx)
        self.post_feedforward_layernorm = UnitOffsetRMSNorm(size, eps, ctx=ctx)

    def forward(
        self, x_TH: torch.Tensor, rotary: Rotary, forward_metadata: ForwardMetaData
    ) -> torch.Tensor:
        out_TH = self.self_attn(self.input_layernorm(x_TH), rotary, forward_metadata)
        x_TH = x_TH + self.post_attention_layernorm(out_TH)
        out_TH = self.mlp(self.pre_feedforward_layernorm(x_TH), forward_metadata)
        sum_TH: torch.Tensor = x_TH + self.post_feedforward_layernorm(out_TH)
        return sum_TH


class Gemma3Model(nn.Module):
    def __init__(self, arch: Gemma3Arch, ctx: ModelContext) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(arch.vocab_size, arch.hidden_size, ctx=ctx)
        self.layers = nn.ModuleList(
            Gemma3Layer(arch, idx, ctx) for idx in range(arch.num_hidden_layers)
        )
        self.norm = UnitOffsetRMSNorm(arch.hidden_size, arch.rms_norm_eps, ctx=ctx)


class Gemma3ForCausalLM(nn.Module):
    """Gemma-3 270m and 1b, and others that keep their architecture."""

    CUSTOM_PARAMS: ClassVar[tuple[str, ...]] = ()
    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, str]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }

    def __init__(self, arch: Gemma3Arch, *, ctx: ModelContext) -> None:
        super().__init__()
        self.arch = arch
        self.dtype = ctx.dtype
        # Rounded to the model's type, as the factor that it was trained with.
        self.embed_scale = torch.tensor(arch.hidden_size**0.5, dtype=ctx.dtype).item()
        self.model = Gemma3Model(arch, ctx)
        tied = self.model.embed_tokens if arch.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(arch.hidden_size, arch.vocab_size, tied=tied, ctx=ctx)
        if tied is not None:
            # A head that is divided otherwise than the embedding has its own share of it.
            self.tied_tensors = {"model.embed_tokens.weight": "lm_head.weight"}
        self.rotaries = nn.ModuleDict(
            {
                kind: RotaryEmbedding(
                    head_dim=arch.head_dim,
                    rope_theta=rope.theta,
                    rope_scaling=rope.scaling,
                    max_position_embeddings=arch.max_position_embeddings,
                )
                for kind, rope in arch.ropes.items()
            }
        )

    def cache_specs(self) -> list[CacheSpec] | None:
        """KV cache of every layer; those with a window share block tables, and the others."""
        return [layer.self_attn.attention.cache_spec for layer in self.model.layers]  # type: ignore[union-attr, misc]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        forward_metadata: ForwardMetaData,
        slot_mapping: Mapping[str, torch.Tensor] | None = None,
        block_table: Mapping[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Packed [T] ids and positions -> [S, V] float32, one row per `logits_indices` entry."""
        x_TH = self.model.embed_tokens(input_ids, forward_metadata) * self.embed_scale
        rotaries = {}
        for kind, rotary in self.rotaries.items():
            cos_TD, sin_TD = rotary(position_ids)
            rotaries[kind] = expand_rotary(cos_TD, sin_TD, self.dtype)
        for layer in self.model.layers:
            x_TH = layer(x_TH, rotaries[layer.layer_type], forward_metadata)  # type: ignore[index]
        x_SH = self.model.norm(sampled_rows(x_TH, forward_metadata))
        logits_SV: torch.Tensor = self.lm_head(x_SH, forward_metadata)
        return logits_SV

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensors (Hugging Face names) that this model needs, with their shapes."""
        arch = self.arch
        hidden, inner = arch.hidden_size, arch.intermediate_size
        of_layer: dict[str, tuple[int, ...]] = {
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "self_attn.q_norm.weight": (arch.head_dim,),
            "self_attn.k_norm.weight": (arch.head_dim,),
        }
        of_layer |= {f"{name}.weight": (hidden,) for name in LAYER_NORMS}
        projections = {
            "q_proj": (arch.q_size, hidden),
            "k_proj": (arch.kv_size, hidden),
            "v_proj": (arch.kv_size, hidden),
            "o_proj": (hidden, arch.q_size),
        }
        for name, (rows, columns) in projections.items():
            of_layer[f"self_attn.{name}.weight"] = (rows, columns)
            if arch.attention_bias:
                of_layer[f"self_attn.{name}.bias"] = (rows,)
        expected: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (arch.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not arch.tie_word_embeddings:
            expected["lm_head.weight"] = (arch.vocab_size, hidden)
        for idx in range(arch.num_hidden_layers):
            expected |= {f"model.layers.{idx}.{name}": shape for name, shape in of_layer.items()}
        return expected

    def ignored_tensors(self, name: str) -> bool:
        """A second copy of a tied head carries nothing."""
        return self.arch.tie_word_embeddings and name == "lm_head.weight"
