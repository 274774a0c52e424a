"""The shape of Qwen3-MoE and Mixtral against transformers' own classes.

What every family must do is in tests/models/test_families.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, MixtralForCausalLM, Qwen3MoeForCausalLM

from inferkit.core.errors import ConfigError
from inferkit.models.moe.arch import MoEArch, parse_arch
from tests.models.same_fields import assert_same_fields

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {**SHAPE, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 24}
MIXTRAL = {**SHAPE, "model_type": "mixtral", "num_local_experts": 4}
CLASSES = {"qwen3_moe": Qwen3MoeForCausalLM, "mixtral": MixtralForCausalLM}


def assert_equals_transformers(keys: dict[str, Any], folder: Path) -> MoEArch:
    (folder / "config.json").write_text(json.dumps(keys))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = CLASSES[config.model_type](config)
    arch = parse_arch(keys, origin="config.json")
    assert_same_fields(arch, config, "num_experts_per_tok")
    assert arch.num_parameters == model.num_parameters()
    assert arch.num_experts == config.num_local_experts
    assert arch.norm_topk_prob == getattr(config, "norm_topk_prob", True)
    assert arch.rope_theta == config.rope_parameters["rope_theta"]
    assert arch.kv_size == model.model.layers[0].self_attn.k_proj.out_features
    assert arch.q_size == model.model.layers[0].self_attn.q_proj.out_features
    for idx, layer in enumerate(model.model.layers):
        assert arch.layer_windows[idx] == config.sliding_window
        assert (idx in arch.moe_layers) == hasattr(layer.mlp, "experts")
    return arch


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
        {"sliding_window": 9},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 3, "mlp_only_layers": [5], "norm_topk_prob": True},
        {"mlp_only_layers": [0, 1, 2, 3, 4, 5]},
        {"mlp_only_layers": None, "tie_word_embeddings": True},
        {"rope_theta": 5e5, "eos_token_id": 7, "bos_token_id": 3},
    ],
)
def test_qwen3_moe_is_read_as_transformers_reads_it(keys: dict[str, Any], tmp_path: Path) -> None:
    arch = assert_equals_transformers(QWEN3_MOE | keys, tmp_path)
    assert arch.qk_norm and arch.architecture == "Qwen3MoeForCausalLM"


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"num_key_value_heads": 2, "head_dim": 16},
        {"sliding_window": 9, "rms_norm_eps": 1e-6},
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"eos_token_id": None, "bos_token_id": None},
    ],
)
def test_mixtral_is_read_as_transformers_reads_it(keys: dict[str, Any], tmp_path: Path) -> None:
    arch = assert_equals_transformers(MIXTRAL | keys, tmp_path)
    assert arch.moe_intermediate_size == arch.intermediate_size
    assert not arch.qk_norm and arch.architecture == "MixtralForCausalLM"


def test_the_number_of_experts_has_two_names() -> None:
    """transformers 5 writes num_local_experts, the published files of Qwen3-MoE num_experts."""
    renamed = QWEN3_MOE | {"num_local_experts": 4}
    assert parse_arch(renamed) == parse_arch(QWEN3_MOE)
    del renamed["num_experts"]
    assert parse_arch(renamed) == parse_arch(QWEN3_MOE)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (MIXTRAL | {"num_local_experts": None}, r"model\.arch\.num_experts is missing"),
        (MIXTRAL | {"num_experts": 8}, r"num_local_experts=4: num_experts=8 is another name"),
        (MIXTRAL | {"num_experts_per_tok": 5}, r"per_tok=5: allowed is 1 to num_experts=4"),
        (MIXTRAL | {"moe_intermediate_size": 8}, r"moe_intermediate_size is not a known key"),
        (MIXTRAL | {"hidden_act": "gelu"}, r"model\.arch\.hidden_act='gelu': allowed is silu"),
        (MIXTRAL | {"hidden_size": 60}, r"num_attention_heads=8: must divide hidden_size=60"),
        (QWEN3_MOE | {"num_experts": 0}, r"num_experts=0: allowed is an integer >= 1"),
        (QWEN3_MOE | {"moe_intermediate_size": None}, r"moe_intermediate_size is missing"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, r"decoder_sparse_step=0: allowed is an integer"),
        (QWEN3_MOE | {"mlp_only_layers": 1}, r"mlp_only_layers=1: allowed is a list"),
        (QWEN3_MOE | {"mlp_only_layers": ["0"]}, r"mlp_only_layers=\['0'\]: allowed is a list"),
        (QWEN3_MOE | {"norm_topk_prob": 1}, r"norm_topk_prob=1: allowed is true or false"),
        (QWEN3_MOE | {"layer_types": []}, r"layer_types is not a known key"),
        (QWEN3_MOE | {"num_hidden_layers": "6"}, r"num_hidden_layers='6': allowed is an integer"),
        (
            QWEN3_MOE | {"model_type": "qwen3"},
            r"='qwen3': allowed: qwen3_moe, mixtral",
        ),
        (SHAPE, r"model\.arch\.architectures is missing: allowed is a list of one name: Qwen3Moe"),
        (SHAPE | {"architectures": "MixtralForCausalLM"}, r"allowed is a list of one name"),
    ],
)
def test_faults_of_a_user_written_arch(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arch(keys)


def test_faults_of_experts_and_of_the_dense_part_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arch(MIXTRAL | {"vocab_size": -1, "num_experts_per_tok": 5}, origin="config.json")
    assert "vocab_size in config.json=-1" in str(caught.value)
    assert "num_experts_per_tok in config.json=5" in str(caught.value)
