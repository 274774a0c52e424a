"""Checkpoints as they are published: in FP8, with MTP layers; and what does not fit."""

import pytest
import torch
from safetensors.torch import load_file

from inferkit import OfflineInference, SamplingParams, load_config
from inferkit.core.errors import ModelLoadError
from inferkit.core.parallel_layout import ParallelLayout
from tests.e2e.schedules import check, prompts, reference_of, run
from tests.families import VARIANTS
from tests.models.deepseek_v3.checkpoints import copy_with, mtp_tensors, save_fp8
from tests.models.deepseek_v3.rank_cases import held_and_expected
from tests.parallel import matrix
from tests.parallel.splits import SPLITS


def load(directory, *overrides):
    llm = OfflineInference(
        load_config(["model=deepseek_v3", f"model.path={directory}", *overrides])
    )
    return llm.parts.engine.worker.model


@pytest.mark.parametrize(
    "name",
    ["deepseek_yarn", pytest.param("deepseek_direct_queries_biases", marks=pytest.mark.full)],
)
def test_fp8_equals_transformers_on_the_dequantised_weights(tiny_hf_model, tmp_path, name):
    coded, plain = tmp_path / "fp8", tmp_path / "plain"
    option, config = VARIANTS[name]
    save_fp8(coded, plain, tiny_hf_model(option, **config))
    stored = load_file(coded / "model.safetensors")
    assert sum(tensor.dtype is torch.float8_e4m3fn for tensor in stored.values()) > 100
    check(*run(coded, "deepseek_v3", "small_chunks"), reference_of(plain), f"fp8 {name}")


@pytest.mark.full
@pytest.mark.parametrize("split", ["tp2", "tp3", "dp2tp2", "narrow", "cp2"])
def test_ranks_read_their_parts_of_fp8(ranks, tiny_hf_model, tmp_path, split):
    """Heads, shares and rotated parts begin inside of blocks."""
    coded, plain = tmp_path / "fp8", tmp_path / "plain"
    save_fp8(coded, plain, tiny_hf_model("deepseek_v3"))
    matrix.check(ranks, split, "deepseek_v3", coded, reference_of(plain))


@pytest.fixture(scope="module")
def with_mtp(tiny_hf_model, tmp_path_factory):
    """(tiny model, the same with two MTP layers)."""
    plain = tiny_hf_model("deepseek_v3")
    directory = tmp_path_factory.mktemp("mtp")
    tensors = load_file(plain / "model.safetensors")
    for layer_idx in (3, 4):
        tensors |= mtp_tensors(plain, layer_idx, like_idx=2)
    copy_with(directory, plain, tensors, num_nextn_predict_layers=2)
    return plain, directory


def test_mtp_layers_are_kept_and_change_no_token(with_mtp):
    plain, directory = with_mtp
    params = SamplingParams(temperature=0.0, max_tokens=5)
    results = []
    for path in (plain, directory):
        overrides = ["model=deepseek_v3", f"model.path={path}", "model.dtype=float32"]
        llm = OfflineInference(load_config(overrides))
        results.append([result.token_ids for result in llm.generate(prompts()[:4], params)])
    assert results[0] == results[1]
    worker = llm.parts.engine.worker
    model, arch = worker.model, worker.model.arch
    num_held = arch.num_parameters + arch.num_mtp_parameters_of_rank(ParallelLayout())
    assert worker.num_weight_bytes == 4 * num_held
    assert len(model.cache_specs()) == arch.num_hidden_layers == 3
    stored = load_file(directory / "model.safetensors")
    for layer_idx, layer in zip((3, 4), model.mtp_layers, strict=True):
        prefix = f"model.layers.{layer_idx}."
        for name in ("enorm", "hnorm", "input_layernorm"):
            assert torch.equal(layer.get_submodule(name).weight, stored[f"{prefix}{name}.weight"])
        x = torch.randn(2, 128)
        torch.testing.assert_close(layer.eh_proj(x), x @ stored[f"{prefix}eh_proj.weight"].T)
        head_norm = stored[f"{prefix}shared_head.norm.weight"]
        assert torch.equal(layer.shared_head["norm"].weight, head_norm)
        bias = stored[f"{prefix}mlp.gate.e_score_correction_bias"]
        assert torch.equal(layer.mlp.gate.e_score_correction_bias, bias)


@pytest.mark.full
@pytest.mark.parametrize("split", ["tp3", "ep2", "narrow", "crossed", "cp2"])
def test_ranks_keep_their_share_of_mtp_layers(ranks, references, with_mtp, split):
    _, directory = with_mtp
    option, _, reference = references("deepseek_v3")
    matrix.check(ranks, split, option, directory, reference)
    world_size, overrides = SPLITS[split]
    overrides = ["model=deepseek_v3", f"model.path={directory}", *overrides]
    for held, expected in ranks(world_size).run(held_and_expected, overrides):
        assert held == expected


def test_a_checkpoint_without_mtp_layers_has_none(with_mtp):
    plain, _ = with_mtp
    model = load(plain)
    assert model.arch.num_mtp_layers == 1 and model.mtp_layers == []


def test_a_half_mtp_layer_is_refused(with_mtp, tmp_path):
    plain, directory = with_mtp
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.4.eh_proj.weight"]
    copy_with(tmp_path, directory, tensors)
    with pytest.raises(ModelLoadError, match="1 missing: model.layers.4.eh_proj.weight"):
        load(tmp_path)


def test_mtp_layers_that_the_configuration_denies_are_refused(with_mtp, tmp_path):
    _, directory = with_mtp
    tensors = load_file(directory / "model.safetensors")
    copy_with(tmp_path, directory, tensors, num_nextn_predict_layers=0)
    with pytest.raises(ModelLoadError, match="not known to the model: model.layers.3"):
        load(tmp_path)


def test_the_router_is_float32_in_every_model_type(with_mtp):
    plain, _ = with_mtp
    model = load(plain, "model.dtype=bfloat16")
    gate = model.model.layers[1].mlp.gate
    stored = load_file(plain / "model.safetensors")
    for name in ("weight", "e_score_correction_bias"):
        parameter = getattr(gate, name)
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, stored[f"model.layers.1.mlp.gate.{name}"])
    assert model.model.norm.weight.dtype is torch.bfloat16
