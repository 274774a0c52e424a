"""What a rank reads and keeps of the experts, and what it computes with them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as HfExperts

from inferkit.core.parallel_layout import ParallelLayout
from inferkit.loader.checkpoint import CheckpointTensor
from inferkit.loader.default_loader import DefaultModelLoader
from inferkit.loader.source import ModelSource, resolve_source
from inferkit.models.gpt_oss.arch import parse_arch
from inferkit.models.gpt_oss.experts import clamped_swiglu
from inferkit.models.gpt_oss.model import GptOssForCausalLM
from tests.models.unjoined import context_of, layout_of

Make = Callable[..., Path]


LAYOUTS = {name: layout_of(name) for name in ("alone", "tp3", "ep4", "wide", "narrow")}
LAYOUTS["ep2tp2"] = replace(layout_of("tp4"), moe_tp_size=2)


def make_model(source: ModelSource, layout: ParallelLayout, rank: int) -> GptOssForCausalLM:
    ctx = context_of(layout, rank, torch.float32)
    return GptOssForCausalLM(parse_arch(source.config), ctx=ctx)


def load(folder: Path, layout: ParallelLayout, rank: int) -> GptOssForCausalLM:
    source = resolve_source(str(folder))
    model = make_model(source, layout, rank)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    DefaultModelLoader().load(model, source)
    return model


def check_experts(experts: Any, tensors: dict[str, torch.Tensor], tp_rank: int) -> None:
    """The rank's slices of all experts that it has, with zeros beyond the last column."""
    chosen = slice(experts.first, experts.first + experts.num_local)
    gate_up, down = tensors["gate_up_proj"][chosen], tensors["down_proj"][chosen]
    bias = tensors["gate_up_proj_bias"][chosen]
    size, inner = experts.local_size, down.shape[1]
    pad = (tp_rank + 1) * size - inner if (tp_rank + 1) * size > inner else 0
    part = slice(tp_rank * size, (tp_rank + 1) * size)

    def rows(x_EI: torch.Tensor) -> torch.Tensor:
        """[E, ..., I] -> [E, size, ...]."""
        x = x_EI[..., part].movedim(-1, 1)
        return nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, pad))

    w13 = torch.cat((rows(gate_up[..., 0::2]), rows(gate_up[..., 1::2])), dim=1)
    b13 = torch.cat((rows(bias[..., 0::2]), rows(bias[..., 1::2])), dim=1)
    assert torch.equal(experts.w13, w13)
    assert torch.equal(experts.b13, b13)
    assert torch.equal(experts.w2, rows(down.transpose(1, 2)).transpose(1, 2))
    assert torch.equal(experts.b2, tensors["down_proj_bias"][chosen])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_holds_its_share(name: str, tiny_hf_model: Make) -> None:
    folder, layout = tiny_hf_model("gpt_oss"), LAYOUTS[name]
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.1.mlp.experts."
    of_layer = {key.removeprefix(prefix): tensors[key] for key in tensors if prefix in key}
    for rank in range(layout.world_size):
        model = load(folder, layout, rank)
        assert not any(parameter.isnan().any() for parameter in model.parameters())
        experts = model.model.layers[1].mlp.experts
        check_experts(experts, of_layer, rank % layout.moe_tp_size)
        attention = model.model.layers[1].self_attn
        sinks = tensors["model.layers.1.self_attn.sinks"]
        expected = [0.0 if head is None else sinks[head].item() for head in attention.head_ids]
        assert attention.sinks.tolist() == expected
        assert attention.attention.sinks_N.data_ptr() == attention.sinks.data_ptr()


@pytest.mark.parametrize("is_coded", [False, True])
def test_a_rank_reads_only_its_share_of_its_experts(
    is_coded: bool, mxfp4_pair: tuple[Path, Path]
) -> None:
    mxfp4, plain = mxfp4_pair
    source = resolve_source(str(mxfp4 if is_coded else plain))
    layout = LAYOUTS["ep2tp2"]
    model = make_model(source, layout, rank=1)
    arch, checkpoint = model.arch, source.checkpoint
    hidden, inner = arch.hidden_size, arch.intermediate_size
    of_value = 17 / 32 if is_coded else 4  # a scale and 16 bytes stand for 32 values
    # The second half of 96 columns begins inside a group of 32, which is read whole.
    down_columns = 64 if is_coded else inner // 2
    bytes_of_expert = {
        "gate_up_proj": hidden * inner * of_value,
        "gate_up_proj_bias": inner * 4,
        "down_proj": down_columns * hidden * of_value,
        "down_proj_bias": hidden * 4,
    }
    experts = model.model.layers[0].mlp.experts
    for name, num_bytes in bytes_of_expert.items():
        before = checkpoint.num_bytes_read
        stored = CheckpointTensor(checkpoint, f"model.layers.0.mlp.experts.{name}")
        experts.load_tensor(name, stored)
        assert checkpoint.num_bytes_read - before == arch.num_experts // 2 * num_bytes, name


def test_mxfp4_experts_are_those_that_transformers_decodes(
    mxfp4_pair: tuple[Path, Path],
) -> None:
    mxfp4, plain = mxfp4_pair
    for rank in range(3):
        coded = load(mxfp4, LAYOUTS["tp3"], rank)
        decoded = load(plain, LAYOUTS["tp3"], rank)
        for name, parameter in coded.named_parameters():
            assert torch.equal(parameter, decoded.get_parameter(name)), name


def test_experts_compute_what_those_of_transformers_do(tiny_hf_model: Make) -> None:
    folder = tiny_hf_model("gpt_oss")
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.0.mlp.experts."
    theirs = HfExperts(AutoConfig.from_pretrained(folder))
    theirs.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if prefix in k})
    model = load(folder, LAYOUTS["alone"], rank=0)
    ours = model.model.layers[0].mlp.experts
    counts = [3, 0, 1, 2, 0, 0, 5, 1]
    x_MH = torch.randn(sum(counts), 64, generator=torch.Generator().manual_seed(0))
    ids_M = torch.arange(8).repeat_interleave(torch.tensor(counts))
    with torch.no_grad():
        expected = theirs(x_MH, ids_M[:, None], torch.ones(len(x_MH), 1))
    torch.testing.assert_close(ours(x_MH, counts), expected, atol=1e-5, rtol=1e-5)


def test_both_halves_are_clamped() -> None:
    gate = torch.tensor([-9.0, -1.0, 0.0, 2.0, 9.0])
    up = torch.tensor([9.0, -9.0, 1.0, 0.5, -0.5])
    out = clamped_swiglu(torch.cat((gate, up))[None], alpha=1.702, limit=7.0)
    cut_gate, cut_up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = cut_gate * torch.sigmoid(1.702 * cut_gate) * (cut_up + 1)
    torch.testing.assert_close(out, expected[None])
    assert cut_gate[0] == -9.0


def test_padded_columns_stay_zero() -> None:
    assert not clamped_swiglu(torch.zeros(2, 6), alpha=1.702, limit=7.0).any()
