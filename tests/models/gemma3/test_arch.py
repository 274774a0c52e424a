"""Keys of Gemma-3 files, old and new, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from inferkit.core.errors import ConfigError
from inferkit.layers.rope_config import RopeScaling
from inferkit.models.gemma3.arch import FULL, SLIDING, Rope, parse_arch
from tests.models.same_fields import assert_same_fields

SHAPE: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
}
# Of the published files of the 1b model, whose rotary keys are at the top.
PUBLISHED: dict[str, Any] = {
    **SHAPE,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 12,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 3,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
ROPE = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    SLIDING: {"rope_type": "default", "rope_theta": 2e4},
}


def assert_equals_transformers(config: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    arch = parse_arch(config, origin="config.json")
    theirs = AutoConfig.from_pretrained(folder)
    assert_same_fields(arch, theirs, "head_dim", "query_pre_attn_scalar", "attention_bias")
    assert list(arch.layer_types) == theirs.layer_types
    for kind, window in zip(arch.layer_types, arch.layer_windows, strict=True):
        assert window == (theirs.sliding_window if kind == SLIDING else None)
    for kind, rope in arch.ropes.items():
        settings = theirs.rope_parameters[kind]
        assert rope.theta == settings["rope_theta"]
        assert (rope.scaling.rope_type if rope.scaling else "default") == settings["rope_type"]
        assert rope.scaling is None or rope.scaling.factor == settings["factor"]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_theta": 5e5, "rope_local_base_freq": 5e3},
        {"layer_types": [FULL, SLIDING] * 3 + [FULL], "attention_bias": True},
    ],
)
def test_a_file_with_rotary_keys_at_the_top(change: dict[str, Any], tmp_path: Path) -> None:
    assert_equals_transformers(PUBLISHED | change, tmp_path)


@pytest.mark.parametrize(
    "change", [{}, {"rope_parameters": ROPE}, {"rope_parameters": {FULL: ROPE[FULL]}}]
)
def test_absent_keys_have_the_defaults_of_transformers(
    change: dict[str, Any], tmp_path: Path
) -> None:
    assert_equals_transformers(SHAPE | change, tmp_path)


def test_the_rotary_keys_of_each_type_of_layer() -> None:
    arch = parse_arch(SHAPE | {"rope_parameters": ROPE})
    assert arch.ropes == {
        FULL: Rope(theta=2e6, scaling=RopeScaling(rope_type="linear", factor=8.0)),
        SLIDING: Rope(theta=2e4, scaling=None),
    }
    assert arch.layer_windows == (4096,) * 5 + (None, 4096)
    assert arch.max_context_len == 131_072


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0: soft caps are not"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0: soft caps are not"),
        ({"use_bidirectional_attention": True}, r"bidirectional_attention=True: allowed is false"),
        ({"hidden_activation": "silu"}, r"hidden_activation='silu': allowed is gelu_pytorch_tanh"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=.*unquantised"),
        ({"architectures": None, "model_type": "gemma3"}, r"='gemma3': allowed: gemma3_text"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, r"list of one name: Gemma3For"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3: num_attention_heads=4 must be a mul"),
        ({"head_dim": 7}, r"head_dim=7: rotary embeddings need an even head size"),
        ({"sliding_window": None}, r"sliding_window=None: layers of sliding_attention need"),
        ({"layer_types": ["sliding"]}, r"layer_types=\['sliding'\]: allowed is a list of full_att"),
        ({"layer_types": [FULL]}, r"layer_types=.*must have one entry for each of 7 layers"),
        ({"rope_parameters": {"rope_theta": 5.0}}, r"rope_parameters=.*one for full_attention and"),
        (
            {"rope_parameters": ROPE, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            r"rope_scaling=.*rope_parameters are given too; keep one",
        ),
        (
            {"rope_parameters": {FULL: {"rope_type": "linear", "factr": 8.0}}},
            r"model\.arch\.rope_parameters\.full_attention\.factr is not a known key",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            r"rope_scaling=.*rope_type=dynamic of full_attention: allowed are default, linear",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arch(SHAPE | change)
