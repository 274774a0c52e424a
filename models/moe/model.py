"""Decoders with routed experts: Qwen3-MoE (attention of Qwen3) and Mixtral (of Mistral).

Everything but the experts is the dense decoder. Legend: T = packed tokens, G = tokens that this
rank routes, E = experts, K = experts per token, H = hidden size.
"""

from typing import ClassVar

import torch
from torch import nn

from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.layers.context import ModelContext
from inferkit.layers.linear import Linear
from inferkit.layers.moe.block import ExpertParallelMoE
from inferkit.layers.moe.experts import LocalExperts
from inferkit.models.dense.arch import DenseArch
from inferkit.models.dense.model import DenseForCausalLM, DenseLayer, Rotary
from inferkit.models.moe.arch import MoEArch


class SoftmaxTopKMoE(ExpertParallelMoE):
    """Experts by the K largest probabilities of a softmax over all of them."""

    def __init__(self, arch: MoEArch, ctx: ModelContext) -> None:
        super().__init__(
            num_experts=arch.num_experts,
            hidden_size=arch.hidden_size,
            intermediate_size=arch.moe_intermediate_size,
            ctx=ctx,
        )
        self.top_k = arch.num_experts_per_tok
        self.norm_topk_prob = arch.norm_topk_prob
        self.gate = Linear(arch.hidden_size, arch.num_experts, ctx=ctx)

    def route(self, x_GH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs_GE = self.gate(x_GH).float().softmax(dim=-1)
        weights_GK, ids_GK = probs_GE.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights_GK = weights_GK / weights_GK.sum(dim=-1, keepdim=True)
        return weights_GK, ids_GK


class MoELayer(DenseLayer):
    def make_mlp(self, arch: DenseArch, layer_idx: int, ctx: ModelContext) -> nn.Module:
        assert isinstance(arch, MoEArch), f"a layer with experts needs a MoEArch, not {arch}"
        if layer_idx in arch.moe_layers:
            return self.make_moe(arch, ctx)
        return super().make_mlp(arch, layer_idx, ctx)

    def make_moe(self, arch: MoEArch, ctx: ModelContext) -> nn.Module:
        return SoftmaxTopKMoE(arch, ctx)


class MoEForCausalLM(DenseForCausalLM):
    """What both families share."""

    layer_class = MoELayer
    arch: MoEArch
    experts_class: ClassVar[type[LocalExperts]] = LocalExperts
    moe_name: ClassVar[str] = "mlp"
    """Where checkpoints have router and experts, below a layer."""

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Those of the dense decoder, with router and experts in the layers that have them."""
        arch, expected = self.arch, super().expected_tensors()
        hidden, inner = arch.hidden_size, arch.moe_intermediate_size
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        for idx in arch.moe_layers:
            for name in ("gate_proj", "up_proj", "down_proj"):
                del expected[f"model.layers.{idx}.mlp.{name}.weight"]
            prefix = f"model.layers.{idx}.{self.moe_name}"
            expected[f"{prefix}.gate.weight"] = (arch.num_experts, hidden)
            for expert in range(arch.num_experts):
                for name, shard in self.experts_class.shard_names.items():
                    expected[f"{prefix}.experts.{expert}.{name}.weight"] = shapes[shard]
        return expected


class Qwen3MoeForCausalLM(MoEForCausalLM):
    """Qwen3-MoE: some layers may have one dense MLP instead of experts."""


class MixtralExperts(LocalExperts):
    shard_names = {"w1": "gate", "w3": "up", "w2": "down"}


class MixtralMoE(SoftmaxTopKMoE):
    experts_class = MixtralExperts


class MixtralLayer(MoELayer):
    """Keeps the experts under the name that the checkpoints have for them."""

    def __init__(self, arch: DenseArch, layer_idx: int, ctx: ModelContext) -> None:
        super().__init__(arch, layer_idx, ctx)
        self.block_sparse_moe = self.mlp
        del self.mlp

    def make_moe(self, arch: MoEArch, ctx: ModelContext) -> nn.Module:
        return MixtralMoE(arch, ctx)

    def forward(
        self, x_TH: torch.Tensor, rotary: Rotary, forward_metadata: ForwardMetaData
    ) -> torch.Tensor:
        x_TH = x_TH + self.self_attn(self.input_layernorm(x_TH), rotary, forward_metadata)
        out_TH: torch.Tensor = x_TH + self.block_sparse_moe(
            self.post_attention_layernorm(x_TH), forward_metadata
        )
        return out_TH


class MixtralForCausalLM(MoEForCausalLM):
    """Mixtral: experts in every layer."""

    layer_class = MixtralLayer
    experts_class = MixtralExperts
    moe_name = "block_sparse_moe"
