"""The router against transformers', token by token."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from inferkit.layers.context import ModelContext
from inferkit.models.deepseek_v3.model import DeepseekV3Router
from inferkit.platforms.cpu import CpuPlatform

HIDDEN, EXPERTS = 24, 16


def make(**keys):
    """(our router, transformers') with equal random weights."""
    keys = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 5, "norm_topk_prob": True} | keys
    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(hidden_size=HIDDEN, n_routed_experts=EXPERTS, **keys)
    )
    arch = SimpleNamespace(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=keys["num_experts_per_tok"],
        num_expert_groups=keys["n_group"],
        num_groups_per_tok=keys["topk_group"],
        norm_topk_prob=keys["norm_topk_prob"],
        routed_scaling_factor=2.5,
    )
    ctx = ModelContext(platform=CpuPlatform(), dtype=torch.bfloat16, block_size=4)
    ours = DeepseekV3Router(arch, ctx)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator))
        theirs.e_score_correction_bias.copy_(torch.randn(EXPERTS, generator=generator) * 0.5)
        ours.weight.copy_(theirs.weight)
        ours.e_score_correction_bias.copy_(theirs.e_score_correction_bias)
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("n_group,topk_group", [(4, 2), (1, 1), (2, 2), (8, 3), (4, 4)])
def test_choice_and_weights_are_those_of_transformers(n_group, topk_group, norm_topk_prob, dtype):
    ours, theirs = make(n_group=n_group, topk_group=topk_group, norm_topk_prob=norm_topk_prob)
    x = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    weights, ids = ours(x)
    _, their_weights, their_ids = theirs(x)
    assert weights.dtype is torch.float32
    order, their_order = ids.argsort(-1), their_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), their_ids.gather(1, their_order))
    torch.testing.assert_close(
        weights.gather(1, order), their_weights.gather(1, their_order), atol=1e-6, rtol=0
    )


def test_the_bias_chooses_and_does_not_weigh():
    ours, _ = make(n_group=1, topk_group=1, norm_topk_prob=False)
    ours.e_score_correction_bias.zero_()
    ours.e_score_correction_bias[7] = 10.0
    x = torch.zeros(1, HIDDEN)
    weights, ids = ours(x)
    assert ids[0, 0] == 7
    torch.testing.assert_close(weights, torch.full((1, 5), 0.5 * 2.5))


def test_experts_of_left_out_groups_are_never_chosen():
    ours, _ = make()
    ours.e_score_correction_bias.zero_()
    ours.e_score_correction_bias[[0, 1]] = 3.0  # group 0, by its two best
    ours.e_score_correction_bias[4] = 4.0  # group 1: one good expert is less than two
    ours.e_score_correction_bias[[8, 9]] = 2.5  # group 2
    _, ids = ours(torch.zeros(1, HIDDEN))
    assert set(ids[0].tolist()) <= {0, 1, 2, 3, 8, 9, 10, 11}
