"""Dense decoder: Llama (also SmolLM2), Mistral, Qwen2 / Qwen2.5, Qwen3.

They differ in what `arch.py` reads from their configuration: biases, normalised queries and keys,
sliding windows, rope scaling, tied embeddings. Legend: T = packed tokens, H = hidden size,
N = heads, D = head dim, S = sampled rows, V = vocabulary.
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
    sampled_rows,
)
from inferkit.layers.linear import (
    OutputProjection,
    QKVParallelLinear,
)
from inferkit.layers.mlp import GatedMLP
from inferkit.layers.norm import RMSNorm
from inferkit.layers.rotary import RotaryEmbedding
from inferkit.models.dense.arch import DenseArch

Rotary = tuple[torch.Tensor, torch.Tensor]


class DenseAttention(nn.Module):
    def __init__(self, arch: DenseArch, layer_idx: int, ctx: ModelContext) -> None:
        super().__init__()
        heads = arch.heads(ctx.comm.layout)
        self.num_heads = heads.num_local_heads
        self.num_kv_heads = heads.num_local_kv_heads
        self.head_dim = arch.head_dim
        self.qkv_proj = QKVParallelLinear(
            arch.hidden_size, heads, arch.head_dim, bias=arch.attention_bias, ctx=ctx
        )
        self.o_proj = OutputProjection(
            heads, arch.head_dim, arch.hidden_size, bias=arch.attention_output_bias, ctx=ctx
        )
        self.has_qk_norm = arch.qk_norm
        if arch.qk_norm:
            self.q_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps, ctx=ctx)
            self.k_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps, ctx=ctx)
        self.attention = self.make_attention(arch, layer_idx, ctx)

    def make_attention(self, arch: DenseArch, layer_idx: int, ctx: ModelContext) -> Attention:
        return Attention(
            layer_idx=layer_idx,
            num_kv_heads=self.num_kv_heads,
            num_model_kv_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            window=arch.layer_windows[layer_idx],
            ctx=ctx,
        )

    def forward(
        self, x_TH: torch.Tensor, rotary: Rotary, forward_metadata: ForwardMetaData
    ) -> torch.Tensor:
        num_qk = self.num_heads + self.num_kv_heads
        qkv_TND = self.qkv_proj(x_TH).view(len(x_TH), -1, self.head_dim)
        qk, v = qkv_TND[:, :num_qk], qkv_TND[:, num_qk:]
        if self.has_qk_norm:
            qk = torch.cat(
                (self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])), dim=1
            )
        qk = apply_rotary(qk, *rotary)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        out_TND = self.attention(q, k, v, forward_metadata)
        out_TH: torch.Tensor = self.o_proj(out_TND.reshape(len(x_TH), -1), forward_metadata)
        return out_TH


class DenseLayer(nn.Module):
    attention_class: ClassVar[type[DenseAttention]] = DenseAttention

    def __init__(self, arch: DenseArch, layer_idx: int, ctx: ModelContext) -> None:
        super().__init__()
        self.self_attn = self.attention_class(arch, layer_idx, ctx)
        self.mlp = self.make_mlp(arch, layer_idx, ctx)
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, ctx=ctx)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, ctx=ctx)

    def make_mlp(self, arch: DenseArch, layer_idx: int, ctx: ModelContext) -> nn.Module:
        return GatedMLP(arch.hidden_size, arch.intermediate_size, bias=arch.mlp_bias, ctx=ctx)

    def forward(
        self, x_TH: torch.Tensor, rotary: Rotary, forward_metadata: ForwardMetaData
    ) -> torch.Tensor:
        x_TH = x_TH + self.self_attn(self.input_layernorm(x_TH), rotary, forward_metadata)
        out_TH: torch.Tensor = x_TH + self.mlp(
            self.post_attention_layernorm(x_TH), forward_metadata
        )
        return out_TH


class DenseModel(nn.Module):
    def __init__(self, arch: DenseArch, layer_class: type[DenseLayer], ctx: ModelContext) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(arch.vocab_size, arch.hidden_size, ctx=ctx)
        self.layers = nn.ModuleList(
            layer_class(arch, idx, ctx) for idx in range(arch.num_hidden_layers)
        )
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, ctx=ctx)


class DenseForCausalLM(nn.Module):
    """The model contract of inferkit (models/README.md), for all dense families."""

    CUSTOM_PARAMS: ClassVar[tuple[str, ...]] = ()
    layer_class: ClassVar[type[DenseLayer]] = DenseLayer
    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, str]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }

    def __init__(self, arch: DenseArch, *, ctx: ModelContext) -> None:
        super().__init__()
        self.arch = arch
        self.dtype = ctx.dtype
        self.model = DenseModel(arch, self.layer_class, ctx)
        tied = self.model.embed_tokens if arch.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(arch.hidden_size, arch.vocab_size, tied=tied, ctx=ctx)
        if tied is not None:
            # A head that is divided otherwise than the embedding has its own share of it.
            self.tied_tensors = {"model.embed_tokens.weight": "lm_head.weight"}
        self.rotary = RotaryEmbedding.from_arch(arch)

    def cache_specs(self) -> list[CacheSpec] | None:
        """KV cache of every layer; None asks for the contiguous cache."""
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
        x_TH = self.model.embed_tokens(input_ids, forward_metadata)
        cos_TD, sin_TD = self.rotary(position_ids, forward_metadata.prompt_len)
        rotary = expand_rotary(cos_TD, sin_TD, self.dtype)
        for layer in self.model.layers:
            x_TH = layer(x_TH, rotary, forward_metadata)
        x_SH = self.model.norm(sampled_rows(x_TH, forward_metadata))
        logits_SV: torch.Tensor = self.lm_head(x_SH, forward_metadata)
        return logits_SV

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensors (Hugging Face names) that this model needs, with their shapes."""
        arch = self.arch
        hidden, inner = arch.hidden_size, arch.intermediate_size
        linears = {
            "self_attn.q_proj": (arch.q_size, hidden, arch.attention_bias),
            "self_attn.k_proj": (arch.kv_size, hidden, arch.attention_bias),
            "self_attn.v_proj": (arch.kv_size, hidden, arch.attention_bias),
            "self_attn.o_proj": (hidden, arch.q_size, arch.attention_output_bias),
            "mlp.gate_proj": (inner, hidden, arch.mlp_bias),
            "mlp.up_proj": (inner, hidden, arch.mlp_bias),
            "mlp.down_proj": (hidden, inner, arch.mlp_bias),
        }
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if arch.qk_norm:
            norms |= {"self_attn.q_norm": arch.head_dim, "self_attn.k_norm": arch.head_dim}
        expected: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (arch.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not arch.tie_word_embeddings:
            expected["lm_head.weight"] = (arch.vocab_size, hidden)
        for idx in range(arch.num_hidden_layers):
            prefix = f"model.layers.{idx}"
            for name, (rows, columns, has_bias) in linears.items():
                expected[f"{prefix}.{name}.weight"] = (rows, columns)
                if has_bias:
                    expected[f"{prefix}.{name}.bias"] = (rows,)
            for name, size in norms.items():
                expected[f"{prefix}.{name}.weight"] = (size,)
        return expected

    def ignored_tensors(self, name: str) -> bool:
        """Checkpoint tensors that carry nothing: computed tables, a second copy of a tied head."""
        return name.endswith("rotary_emb.inv_freq") or (
            self.arch.tie_word_embeddings and name == "lm_head.weight"
        )


class LlamaForCausalLM(DenseForCausalLM):
    """Llama 1-3, SmolLM2 and others that keep its name."""


class MistralForCausalLM(DenseForCausalLM):
    """Mistral: Llama with a sliding window."""


class Qwen2ForCausalLM(DenseForCausalLM):
    """Qwen2 and Qwen2.5: biases on q, k and v; a window in the upper layers of some."""


class Qwen3ForCausalLM(DenseForCausalLM):
    """Qwen3: normalised queries and keys."""
