"""DeepSeek-V3 and R1: latent attention and grouped experts (arXiv 2412.19437).

Legend: T = packed tokens, G = tokens that this rank routes, H = hidden size, N = heads of this
rank, Q = size of a query head, P = rotated part of it, C = latent size, E = experts, K = experts
per token, S = sampled rows, V = vocabulary.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from inferkit.core.cache_spec import CacheSpec
from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.layers.context import ModelContext
from inferkit.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from inferkit.layers.functional import apply_rotary, expand_rotary, sampled_rows
from inferkit.layers.latent_attention import (
    HeadParallelLinear,
    LatentAttention,
    LatentExpansion,
)
from inferkit.layers.linear import Linear, OutputProjection
from inferkit.layers.mlp import GatedMLP
from inferkit.layers.moe.block import ExpertParallelMoE
from inferkit.layers.norm import RMSNorm
from inferkit.layers.rotary import RotaryEmbedding
from inferkit.models.deepseek_v3.arch import DeepseekV3Arch
from inferkit.models.deepseek_v3.tensors import main_tensors, mtp_prefixes, mtp_tensors

Rotary = tuple[torch.Tensor, torch.Tensor]

LATENT_NORM_EPS = 1e-6
"""Of the two norms of latents, whatever rms_norm_eps is (as in transformers)."""
WEIGHT_SUM_EPS = 1e-20
"""Keeps the weights of a token finite whose experts all score 0 (as in transformers)."""


class DeepseekV3Attention(nn.Module):
    """`layer_idx` None: weights only, without a cache."""

    def __init__(self, arch: DeepseekV3Arch, layer_idx: int | None, ctx: ModelContext) -> None:
        super().__init__()
        layout = arch.heads(ctx.comm.layout)
        heads = layout.heads(ctx.comm.group("attn_tp_group").rank)
        hidden, rope = arch.hidden_size, arch.qk_rope_head_dim
        interleaved = rope if arch.rope_interleave else 0
        self.arch = arch
        self.has_q_latent = arch.q_lora_rank is not None
        if arch.q_lora_rank is None:
            self.q_proj = HeadParallelLinear(
                hidden, heads, arch.qk_head_dim, interleaved=interleaved, ctx=ctx
            )
        else:
            self.q_a_proj = Linear(hidden, arch.q_lora_rank, bias=arch.attention_bias, ctx=ctx)
            self.q_a_layernorm = RMSNorm(arch.q_lora_rank, LATENT_NORM_EPS, ctx=ctx)
            self.q_b_proj = HeadParallelLinear(
                arch.q_lora_rank, heads, arch.qk_head_dim, interleaved=interleaved, ctx=ctx
            )
        # One head for all, on every rank: [latent | rotated part].
        self.kv_a_proj_with_mqa = HeadParallelLinear(
            hidden,
            [0],
            arch.kv_lora_rank + rope,
            interleaved=interleaved,
            bias=arch.attention_bias,
            ctx=ctx,
        )
        self.kv_a_layernorm = RMSNorm(arch.kv_lora_rank, LATENT_NORM_EPS, ctx=ctx)
        self.kv_b_proj = LatentExpansion(
            arch.kv_lora_rank, heads, arch.qk_nope_head_dim, arch.v_head_dim, ctx=ctx
        )
        self.o_proj = OutputProjection(
            layout, arch.v_head_dim, hidden, bias=arch.attention_bias, ctx=ctx
        )
        if layer_idx is not None:
            self.attention = LatentAttention(
                layer_idx=layer_idx,
                latent_size=arch.kv_lora_rank,
                rope_size=rope,
                scale=arch.softmax_scale,
                ctx=ctx,
            )

    def forward(
        self, x_TH: torch.Tensor, rotary: Rotary, forward_metadata: ForwardMetaData
    ) -> torch.Tensor:
        arch = self.arch
        if self.has_q_latent:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TH)))
        else:
            q = self.q_proj(x_TH)
        q_TNQ = q.unflatten(1, (-1, arch.qk_head_dim))
        q_TNP = q_TNQ[..., arch.qk_nope_head_dim :]
        q_TNP.copy_(apply_rotary(q_TNP, *rotary))
        kv_T1 = self.kv_a_proj_with_mqa(x_TH)[:, None]
        latent_T1C = self.kv_a_layernorm(kv_T1[..., : arch.kv_lora_rank])
        rope_T1P = apply_rotary(kv_T1[..., arch.kv_lora_rank :], *rotary)
        out_TNV = self.attention(
            q_TNQ, latent_T1C, rope_T1P, self.kv_b_proj.weights, forward_metadata
        )
        out_TH: torch.Tensor = self.o_proj(out_TNV.flatten(1), forward_metadata)
        return out_TH


class DeepseekV3Router(nn.Module):
    """Sigmoid scores of all experts, float32 in every model type.

    A bias decides with the scores who is chosen, and is no part of the weights. Only the groups
    whose two best experts have the highest sums are considered.
    """

    def __init__(self, arch: DeepseekV3Arch, ctx: ModelContext) -> None:
        super().__init__()
        self.arch = arch
        float32 = replace(ctx, dtype=torch.float32)
        self.weight = float32.empty(arch.num_experts, arch.hidden_size)
        self.e_score_correction_bias = float32.empty(arch.num_experts)

    def forward(self, x_GH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights [G, K] float32, expert ids [G, K] int64)."""
        arch = self.arch
        scores_GE = F.linear(x_GH.float(), self.weight).sigmoid()
        ranking_GE = scores_GE + self.e_score_correction_bias
        if arch.num_groups_per_tok < arch.num_expert_groups:
            grouped = ranking_GE.unflatten(1, (arch.num_expert_groups, -1))
            of_group = grouped.topk(2, dim=-1).values.sum(dim=-1)
            chosen = of_group.topk(arch.num_groups_per_tok, dim=-1).indices
            is_left_out = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, chosen, False)
            ranking_GE = grouped.masked_fill(is_left_out[..., None], float("-inf")).flatten(1)
        ids_GK = ranking_GE.topk(arch.num_experts_per_tok, dim=-1).indices
        weights_GK = scores_GE.gather(1, ids_GK)
        if arch.norm_topk_prob:
            weights_GK = weights_GK / (weights_GK.sum(dim=-1, keepdim=True) + WEIGHT_SUM_EPS)
        return weights_GK * arch.routed_scaling_factor, ids_GK


class DeepseekV3MoE(ExpertParallelMoE):
    """Routed experts, and shared ones that every token takes."""

    def __init__(self, arch: DeepseekV3Arch, ctx: ModelContext) -> None:
        super().__init__(
            num_experts=arch.num_experts,
            hidden_size=arch.hidden_size,
            intermediate_size=arch.moe_intermediate_size,
            ctx=ctx,
        )
        self.gate = DeepseekV3Router(arch, ctx)
        self.shared_experts = GatedMLP(
            arch.hidden_size, arch.shared_intermediate_size, kind="shared", ctx=ctx
        )

    def route(self, x_GH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routed: tuple[torch.Tensor, torch.Tensor] = self.gate(x_GH)
        return routed

    def forward(self, x_TH: torch.Tensor, metadata: ForwardMetaData) -> torch.Tensor:
        shared_TH: torch.Tensor = self.shared_experts(x_TH, metadata)
        return super().forward(x_TH, metadata) + shared_TH


class DeepseekV3Layer(nn.Module):
    def __init__(
        self, arch: DeepseekV3Arch, layer_idx: int | None, ctx: ModelContext, *, is_dense: bool
    ) -> None:
        super().__init__()
        self.self_attn = DeepseekV3Attention(arch, layer_idx, ctx)
        self.mlp = (
            GatedMLP(arch.hidden_size, arch.intermediate_size, ctx=ctx)
            if is_dense
            else DeepseekV3MoE(arch, ctx)
        )
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, ctx=ctx)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, ctx=ctx)

    def forward(
        self, x_TH: torch.Tensor, rotary: Rotary, forward_metadata: ForwardMetaData
    ) -> torch.Tensor:
        x_TH = x_TH + self.self_attn(self.input_layernorm(x_TH), rotary, forward_metadata)
        out_TH: torch.Tensor = x_TH + self.mlp(
            self.post_attention_layernorm(x_TH), forward_metadata
        )
        return out_TH


class MtpLayer(DeepseekV3Layer):
    """Weights of a layer that predicts one further token; it has no cache, and does not run yet.

    Embedding and head are those of the main model: the copies in a checkpoint are not read.
    """

    def __init__(self, arch: DeepseekV3Arch, ctx: ModelContext) -> None:
        super().__init__(arch, None, ctx, is_dense=False)
        hidden, eps = arch.hidden_size, arch.rms_norm_eps
        self.enorm = RMSNorm(hidden, eps, ctx=ctx)
        self.hnorm = RMSNorm(hidden, eps, ctx=ctx)
        self.eh_proj = Linear(2 * hidden, hidden, ctx=ctx)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(hidden, eps, ctx=ctx)})


class DeepseekV3Model(nn.Module):
    """`layers` has the main layers, then those MTP layers that the checkpoint has."""

    def __init__(self, arch: DeepseekV3Arch, ctx: ModelContext) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(arch.vocab_size, arch.hidden_size, ctx=ctx)
        self.layers = nn.ModuleList(
            DeepseekV3Layer(arch, idx, ctx, is_dense=idx < arch.num_leading_dense_layers)
            for idx in range(arch.num_hidden_layers)
        )
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, ctx=ctx)


class DeepseekV3ForCausalLM(nn.Module):
    """The model contract of inferkit (models/README.md)."""

    CUSTOM_PARAMS: ClassVar[tuple[str, ...]] = ()
    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, str]]] = {
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }

    def __init__(self, arch: DeepseekV3Arch, *, ctx: ModelContext) -> None:
        super().__init__()
        self.arch = arch
        self.ctx = ctx
        self.model = DeepseekV3Model(arch, ctx)
        tied = self.model.embed_tokens if arch.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(arch.hidden_size, arch.vocab_size, tied=tied, ctx=ctx)
        if tied is not None:
            self.tied_tensors = {"model.embed_tokens.weight": "lm_head.weight"}
        self.rotary = RotaryEmbedding(
            head_dim=arch.qk_rope_head_dim,
            rope_theta=arch.rope_theta,
            rope_scaling=arch.rope_scaling,
            max_position_embeddings=arch.max_position_embeddings,
        )

    @property
    def main_layers(self) -> Iterator[DeepseekV3Layer]:
        yield from self.model.layers[: self.arch.num_hidden_layers]  # type: ignore[misc]

    @property
    def mtp_layers(self) -> list[MtpLayer]:
        """Those that were loaded: all or none of `arch.num_mtp_layers`."""
        return list(self.model.layers[self.arch.num_hidden_layers :])  # type: ignore[arg-type]

    def add_optional_modules(self, names: Collection[str]) -> None:
        """Make room for the MTP layers, where a checkpoint with tensors of these names has them.

        Called on every rank with equal names, before the weights are assigned.
        """
        prefixes = mtp_prefixes(self.arch)
        if self.mtp_layers or not any(name.startswith(prefixes) for name in names):
            return
        self.model.layers.extend(MtpLayer(self.arch, self.ctx) for _ in prefixes)

    def cache_specs(self) -> list[CacheSpec] | None:
        """Latent cache of every main layer."""
        return [layer.self_attn.attention.cache_spec for layer in self.main_layers]

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
        cos_TP, sin_TP = self.rotary(position_ids)
        rotary = expand_rotary(cos_TP, sin_TP, self.ctx.dtype)
        for layer in self.main_layers:
            x_TH = layer(x_TH, rotary, forward_metadata)
        x_SH = self.model.norm(sampled_rows(x_TH, forward_metadata))
        logits_SV: torch.Tensor = self.lm_head(x_SH, forward_metadata)
        return logits_SV

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensors (Hugging Face names) that this model needs, with their shapes."""
        expected = main_tensors(self.arch)
        return expected | mtp_tensors(self.arch) if self.mtp_layers else expected

    def ignored_tensors(self, name: str) -> bool:
        """Checkpoint tensors that carry nothing: computed tables, copies of embedding and head."""
        if name.endswith("rotary_emb.inv_freq"):
            return True
        if name.startswith(mtp_prefixes(self.arch)):
            return name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
        return self.arch.tie_word_embeddings and name == "lm_head.weight"
