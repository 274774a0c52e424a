"""gpt-oss: a dense decoder's frame with attention sinks and a mixture of experts in every layer.

Every other layer has a sliding window. Legend: T = packed tokens, G = tokens that this rank routes,
K = experts per token, E = experts, H = hidden size, I = intermediate size of an expert.
"""

from functools import partial

import torch
from torch import nn

from inferkit.layers.attention import Attention
from inferkit.layers.context import ModelContext
from inferkit.layers.linear import Linear, load_heads
from inferkit.layers.moe.block import ExpertParallelMoE
from inferkit.layers.weights import StoredTensor
from inferkit.models.dense.arch import DenseArch
from inferkit.models.dense.model import DenseAttention, DenseForCausalLM, DenseLayer
from inferkit.models.gpt_oss.arch import GptOssArch
from inferkit.models.gpt_oss.experts import GptOssExperts, clamped_swiglu


class GptOssAttention(DenseAttention):
    """Heads of a dense decoder, each with a sink: a learned logit that no value belongs to."""

    def make_attention(self, arch: DenseArch, layer_idx: int, ctx: ModelContext) -> Attention:
        self.head_ids = arch.heads(ctx.comm.layout).heads(ctx.comm.group("attn_tp_group").rank)
        self.sinks = ctx.empty(self.num_heads)
        self.sinks.weight_loader = self._load_sinks  # type: ignore[attr-defined]
        return Attention(
            layer_idx=layer_idx,
            num_kv_heads=self.num_kv_heads,
            num_model_kv_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            window=arch.layer_windows[layer_idx],
            sinks=self.sinks,
            ctx=ctx,
        )

    def _load_sinks(
        self, parameter: torch.Tensor, stored: StoredTensor, shard_id: str | None
    ) -> None:
        load_heads(parameter, stored, self.head_ids, 1, dim=0)


class GptOssMoE(ExpertParallelMoE):
    experts_class = GptOssExperts

    def __init__(self, arch: GptOssArch, ctx: ModelContext) -> None:
        activation = partial(clamped_swiglu, alpha=arch.swiglu_alpha, limit=arch.swiglu_limit)
        super().__init__(
            num_experts=arch.num_experts,
            hidden_size=arch.hidden_size,
            intermediate_size=arch.intermediate_size,
            bias=True,
            activation=activation,
            ctx=ctx,
        )
        self.num_chosen = arch.num_experts_per_tok
        self.router = Linear(arch.hidden_size, arch.num_experts, bias=True, ctx=ctx)

    def route(self, x_GH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The K best experts of each token, with a softmax over these alone as weights."""
        logits_GK, ids_GK = self.router(x_GH).topk(self.num_chosen, dim=-1)
        return logits_GK.softmax(-1, dtype=torch.float32), ids_GK


class GptOssLayer(DenseLayer):
    attention_class = GptOssAttention

    def make_mlp(self, arch: DenseArch, layer_idx: int, ctx: ModelContext) -> nn.Module:
        assert isinstance(arch, GptOssArch), "the model is built with the arch of its family"
        return GptOssMoE(arch, ctx)


class GptOssForCausalLM(DenseForCausalLM):
    """gpt-oss-20b and 120b, in bfloat16 or with the MXFP4 experts of the published files."""

    layer_class = GptOssLayer
    arch: GptOssArch

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensors (Hugging Face names) that this model needs, with their shapes."""
        arch = self.arch
        hidden, inner, num_experts = arch.hidden_size, arch.intermediate_size, arch.num_experts
        of_layer = {
            "self_attn.sinks": (arch.num_attention_heads,),
            "mlp.router.weight": (num_experts, hidden),
            "mlp.router.bias": (num_experts,),
            "mlp.experts.gate_up_proj": (num_experts, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (num_experts, 2 * inner),
            "mlp.experts.down_proj": (num_experts, inner, hidden),
            "mlp.experts.down_proj_bias": (num_experts, hidden),
        }
        dense_parts = (".gate_proj.", ".up_proj.", ".down_proj.")
        expected = {
            name: shape
            for name, shape in super().expected_tensors().items()
            if not any(part in name for part in dense_parts)
        }
        for idx in range(arch.num_hidden_layers):
            for name, shape in of_layer.items():
                expected[f"model.layers.{idx}.{name}"] = shape
        return expected
