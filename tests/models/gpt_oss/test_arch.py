"""The shape of gpt-oss against transformers' own configuration class and model.

What every family must do is in tests/models/test_families.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig

from inferkit.core.errors import ConfigError
from inferkit.layers.rope_config import RopeScaling
from inferkit.models.gpt_oss.arch import GptOssArch, parse_arch
from tests.models.same_fields import assert_same_fields

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_local_experts": 6,
}
# The file of gpt-oss-20b, without its list of layer types.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def assert_equals_transformers(arch: GptOssArch, config: Any) -> None:
    names = ("head_dim", "attention_bias", "num_experts_per_tok", "swiglu_alpha", "swiglu_limit")
    assert_same_fields(arch, config, *names)
    assert arch.num_experts == config.num_local_experts
    rope = config.rope_parameters
    assert arch.rope_theta == rope["rope_theta"]
    if rope["rope_type"] == "default":
        assert arch.rope_scaling is None
    else:
        assert arch.rope_scaling is not None
        for name in ("rope_type", "factor", "original_max_position_embeddings"):
            assert getattr(arch.rope_scaling, name) == rope[name], name
        assert arch.rope_scaling.truncate == rope.get("truncate", True)
    config.quantization_config = None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert arch.num_parameters == model.num_parameters()
    windows = [layer.self_attn.sliding_window for layer in model.model.layers]
    assert list(arch.layer_windows) == windows


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"head_dim": 16, "tie_word_embeddings": True, "eos_token_id": [2, 7], "bos_token_id": 5},
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 99},
        {"attention_bias": False, "swiglu_alpha": 1.0, "swiglu_limit": 3.0, "sliding_window": 9},
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ],
)
def test_a_saved_config_is_read_as_transformers_reads_it(
    values: dict[str, Any], tmp_path: Path
) -> None:
    config = GptOssConfig(**SHAPE | values)
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    arch = parse_arch(saved, origin=str(tmp_path / "config.json"))
    assert_equals_transformers(arch, AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "default"}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ],
)
def test_a_hand_written_config_is_read_as_transformers_reads_it(
    values: dict[str, Any], tmp_path: Path
) -> None:
    config = {"model_type": "gpt_oss", **SHAPE, **values}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_equals_transformers(parse_arch(config), AutoConfig.from_pretrained(tmp_path))


def test_the_published_file_is_read_with_its_quantisation(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    arch = parse_arch(PUBLISHED)
    assert_equals_transformers(arch, AutoConfig.from_pretrained(tmp_path))
    assert arch.max_context_len == 131072
    assert arch.rope_scaling == RopeScaling(
        rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
    )
    assert arch.layer_windows[:3] == (128, None, 128)
    assert arch.kv_bytes_per_token("bfloat16") == 24 * 2 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": None}, r"num_local_experts is missing: give an integer >= 1"),
        ({"num_experts_per_tok": 7}, r"num_experts_per_tok=7: allowed is at most .*experts=6"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3: num_attention_heads=16 must be a"),
        ({"head_dim": 5}, r"head_dim=5: rotary embeddings need an even head size"),
        ({"hidden_act": "gelu"}, r"model\.arch\.hidden_act='gelu': allowed is silu"),
        ({"swiglu_limit": 0}, r"swiglu_limit=0: allowed is a number > 0"),
        ({"sliding_window": None}, r"sliding_window=None: layers of sliding_attention need"),
        ({"sliding_window": 0}, r"sliding_window=0: allowed is an integer >= 1"),
        ({"layer_types": ["full"]}, r"layer_types=\['full'\]: allowed is a list of full_att"),
        ({"layer_types": ["full_attention"]}, r"must have one entry for each of 3 layers"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"list of one name: GptOssForCausalLM",
        ),
        (
            {"architectures": "GptOssForCausalLM"},
            r"list of one name: GptOssForCausalLM",
        ),
        ({"model_type": "llama"}, r"model_type='llama': allowed: gpt_oss"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"allowed is quant_method mxfp4"),
        ({"quantization_config": 4}, r"quantization_config=4: allowed is quant_method mxfp4"),
        ({"num_local_expert": 6}, r"not a known key; did you mean num_local_experts\?"),
        ({"rope_scaling": 4}, r"rope_scaling=4: allowed is a dictionary or null"),
    ],
)
def test_a_faulty_key_is_named_with_what_is_allowed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arch({**SHAPE, **change})
