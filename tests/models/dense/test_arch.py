"""The shape of dense decoders against transformers' own configuration classes and models.

What every family must do is in tests/models/test_families.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from inferkit.core.errors import ConfigError
from inferkit.layers.rope_config import RopeScaling
from inferkit.models.dense.arch import (
    FAMILIES,
    DenseArch,
    check_user_arch,
    known_keys,
    parse_arch,
)
from tests.models.same_fields import assert_same_fields

CONFIGS = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
}
SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 5e5,
    },
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 5e5,
    },
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 6,
        "long_factor": [2.0] * 6,
        "rope_theta": 5e5,
    },
]


def assert_equals_transformers(arch: DenseArch, config: Any) -> None:
    assert_same_fields(arch, config, "model_type", "hidden_act")
    assert arch.rope_theta == config.rope_parameters["rope_theta"]
    rope_type = config.rope_parameters["rope_type"]
    assert (arch.rope_scaling.rope_type if arch.rope_scaling else "default") == rope_type
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    assert arch.num_parameters == model.num_parameters()
    attention = model.model.layers[0].self_attn
    assert arch.q_size == attention.q_proj.out_features
    assert arch.kv_size == attention.k_proj.out_features
    assert arch.attention_bias == (attention.q_proj.bias is not None)
    assert arch.attention_output_bias == (attention.o_proj.bias is not None)
    assert arch.mlp_bias == (model.model.layers[0].mlp.up_proj.bias is not None)
    assert arch.qk_norm == hasattr(attention, "q_norm")
    for idx, layer in enumerate(model.model.layers):
        window = getattr(layer.self_attn, "sliding_window", getattr(config, "sliding_window", None))
        assert arch.layer_windows[idx] == window


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"head_dim": 16, "tie_word_embeddings": True, "eos_token_id": [2, 7], "bos_token_id": 5},
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 99},
        {"attention_bias": True, "mlp_bias": True},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"eos_token_id": None, "bos_token_id": None},
    ],
)
def test_a_saved_config_is_read_as_transformers_reads_it(
    architecture: str, values: dict[str, Any], tmp_path: Path
) -> None:
    known = {key for key in values if key in known_keys(architecture)}
    config = CONFIGS[architecture](**SHAPE | {key: values[key] for key in known})
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    arch = parse_arch(saved, origin=str(tmp_path / "config.json"))
    assert arch.architecture == architecture
    assert_equals_transformers(arch, AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope["rope_type"]))
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_hand_written_config_is_read_as_transformers_reads_it(
    architecture: str, form: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    config = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "torch_dtype": "bfloat16",
        **SHAPE,
        "head_dim": 12,
        "max_position_embeddings": 256,
    }
    if form == "rope_parameters":
        config["rope_parameters"] = rope
    else:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        if form == "type":
            scaling["type"] = scaling.pop("rope_type")
        is_default = rope["rope_type"] == "default"
        config |= {"rope_theta": 5e5, "rope_scaling": None if is_default else scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = parse_arch(config, origin="config.json")
    assert_equals_transformers(arch, AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_absent_keys_have_the_defaults_of_transformers(architecture: str, tmp_path: Path) -> None:
    config = {"model_type": FAMILIES[architecture].model_type, **SHAPE}
    config |= {"num_attention_heads": 32, "hidden_size": 64, "num_hidden_layers": 30}
    del config["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = parse_arch(config)
    assert arch.architecture == architecture
    assert_equals_transformers(arch, AutoConfig.from_pretrained(tmp_path))


def test_layer_types_choose_the_layers_with_a_window() -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        **SHAPE,
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    assert parse_arch(config).layer_windows == (16, None, 16)


def test_original_context_at_the_top_level_wins() -> None:
    config = {"model_type": "llama", **SHAPE, "original_max_position_embeddings": 32}
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    scaling = parse_arch(config).rope_scaling
    assert scaling == RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)


def test_size_of_the_cache() -> None:
    arch = parse_arch({"model_type": "llama", **SHAPE})
    assert arch.kv_bytes_per_token("bfloat16") == 3 * 2 * 2 * 12 * 2
    assert arch.kv_bytes_per_token("float32") == 2 * arch.kv_bytes_per_token("bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, r"model\.arch\.hidden_act='gelu': allowed is silu"),
        ({"vocab_size": None}, r"model\.arch\.vocab_size is missing: give an integer >= 1"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers=0: allowed is an integer >= 1"),
        ({"num_hidden_layers": True}, r"num_hidden_layers=True: allowed is an integer >= 1"),
        ({"rms_norm_eps": "small"}, r"rms_norm_eps='small': allowed is a number > 0"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps=nan: allowed is a number > 0"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings='yes': allowed is true or false"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3: num_attention_heads=4 must be"),
        ({"hidden_size": 50}, r"num_attention_heads=4: must divide hidden_size=50"),
        ({"hidden_size": "48"}, r"^model\.arch\.hidden_size='48': allowed is an integer >= 1$"),
        ({"head_dim": 5}, r"head_dim=5: rotary embeddings need an even head size"),
        ({"eos_token_id": "</s>"}, r"eos_token_id='</s>': allowed is a token id"),
        ({"hiden_size": 48}, r"hiden_size is not a known key; did you mean hidden_size\?"),
        ({"sliding_window": 4}, r"sliding_window is not a known key"),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"list of one name: LlamaForCausalLM, Mistral",
        ),
        ({"architectures": "LlamaForCausalLM"}, r"allowed is a list of one name"),
        ({"model_type": "gpt2"}, r"model_type='gpt2': allowed: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, r"model\.arch\.architectures is missing"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=.*unquantised"),
        ({"rope_theta": -1.0}, r"rope_theta=-1\.0: allowed is a number > 1"),
        ({"rope_scaling": 4}, r"rope_scaling=4: allowed is a dictionary or null"),
        ({"rope_scaling": {"type": "mrope"}}, r"rope_scaling\.type='mrope': allowed are default"),
        (
            {"rope_scaling": {"type": "linear"}},
            r"model\.arch\.rope_scaling\.factor is missing: give a number >= 1",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            r"rope_scaling\.factor=0\.5: allowed is a number >= 1",
        ),
        (
            {"rope_scaling": {"type": "yarn", "beta_fst": 3}},
            r"rope_scaling\.beta_fst is not a known key; did you mean beta_fast",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            r"rope_theta=10000\.0: contradicts model\.arch\.rope_parameters\.rope_theta=1e\+06",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5}},
            r"rope_scaling=.*contradicts rope_parameters; keep one",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5}}},
            r"settings per layer type are not supported",
        ),
        (
            {"rope_parameters": {"rope_theta": 5, "partial_rotary_factor": 0.5}},
            r"partial_rotary_factor=0\.5: these models rotate whole heads",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 6}},
            r"short_factor=\[1\.0\]: allowed is a list of 6 numbers",
        ),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 1,
                }
            },
            r"high_freq_factor=1: allowed is more than low_freq_factor=4",
        ),
    ],
)
def test_a_faulty_key_is_named_with_what_is_allowed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arch({"model_type": "llama", **SHAPE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding"]}, r"layer_types=\['sliding'\]: allowed is a list of full_att"),
        ({"layer_types": ["full_attention"]}, r"must have one entry for each of 3 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, r"needs use_sliding_window=true"),
        ({"use_sliding_window": True, "sliding_window": 0}, r"sliding_window=0: allowed is an int"),
    ],
)
def test_a_faulty_window_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arch({"model_type": "qwen2", **SHAPE, **change})


def test_all_faults_are_named_at_once_with_the_file() -> None:
    config = {"model_type": "llama", **SHAPE, "hidden_act": "gelu", "vocab_size": -1, "mystery": 1}
    with pytest.raises(ConfigError) as caught:
        parse_arch(config, origin="/m/config.json")
    assert sorted(str(caught.value).splitlines()) == [
        "hidden_act in /m/config.json='gelu': allowed is silu",
        "vocab_size in /m/config.json=-1: allowed is an integer >= 1",
    ]


def test_architecture_can_come_from_the_chosen_class() -> None:
    arch = parse_arch(SHAPE | {"head_dim": 8}, architecture="Qwen3ForCausalLM")
    assert arch.model_type == "qwen3"
    assert arch.qk_norm
    llama = {"model_type": "llama", **SHAPE}
    assert parse_arch(llama, architecture="UsersForCausalLM") == parse_arch(llama)
    with pytest.raises(ConfigError, match=r"model_type='llama': allowed: qwen3$"):
        parse_arch(llama, architecture="Qwen3ForCausalLM")


def test_user_keys_beside_a_file_must_agree_with_it() -> None:
    config = {"model_type": "llama", **SHAPE}
    check_user_arch({"hidden_size": 48, "tie_word_embeddings": False}, config, origin="f")
    with pytest.raises(ConfigError) as caught:
        check_user_arch({"hidden_size": 64, "hiddn_act": "silu"}, config, origin="config.json")
    assert str(caught.value).splitlines() == [
        "model.arch.hiddn_act is not a known key; did you mean hidden_act?",
        "model.arch.hidden_size=64: config.json has 48; the file decides, drop the key",
    ]


def test_null_kv_heads_mean_one_for_each_query_head() -> None:
    assert parse_arch({"model_type": "qwen2", **SHAPE, "num_key_value_heads": None}).kv_size == 48
