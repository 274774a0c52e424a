"""The shape of DeepSeek-V3 against its published sizes, and what its keys may not be.

What holds for every family is in tests/models/test_families.py.
"""

import math

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from inferkit.core.errors import ConfigError
from inferkit.core.parallel_layout import ParallelLayout
from inferkit.models.deepseek_v3.arch import parse_arch
from inferkit.models.deepseek_v3.tensors import main_tensors, mtp_tensors
from tests.families import DEEPSEEK_YARN, VARIANTS

# The keys of the published config.json that decide its shape.
PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def total(tensors):
    return sum(math.prod(shape) for shape in tensors.values())


def test_the_published_model_has_the_published_size():
    """671B in the main model, 685B with its MTP layer and the copies of embedding and head."""
    arch = parse_arch(PUBLISHED, origin="config.json")
    assert arch == parse_arch(PUBLISHED), "a user may write every one of its keys"
    assert arch.num_parameters == total(main_tensors(arch))
    assert round(arch.num_parameters / 1e9) == 671
    alone = ParallelLayout()
    num_mtp = arch.num_mtp_parameters_of_rank(alone)
    assert num_mtp == total(mtp_tensors(arch))
    copies = 2 * arch.vocab_size * arch.hidden_size
    assert round((arch.num_parameters + num_mtp + copies) / 1e8) == 6845
    assert arch.max_context_len == 163840
    assert arch.kv_bytes_per_token("bfloat16") == 61 * 576 * 2


def test_every_rank_of_an_attention_group_stores_the_whole_latent():
    arch = parse_arch(PUBLISHED, origin="config.json")
    layout = ParallelLayout(world_size=16, attn_tp_size=16)
    assert arch.kv_bytes_per_token_of_rank("bfloat16", layout) == 61 * 576 * 2


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("deepseek")])
def test_the_scale_of_the_scores_is_that_of_transformers(tiny_hf_model, variant):
    option, config = VARIANTS[variant]
    keys = DeepseekV3Config.from_pretrained(tiny_hf_model(option, **config))
    with torch.device("meta"):
        attention = DeepseekV3ForCausalLM(keys).model.layers[0].self_attn
    arch = parse_arch(keys.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}, origin="file")
    assert arch.softmax_scale == pytest.approx(attention.scaling, rel=1e-12)
    if config.get("rope_parameters") is DEEPSEEK_YARN:
        assert arch.softmax_scale > 1.2 * arch.qk_head_dim**-0.5


@pytest.mark.parametrize(
    "keys,message",
    [
        ({"scoring_func": "softmax"}, "scoring_func.*allowed is sigmoid"),
        ({"topk_method": "greedy"}, "topk_method.*allowed is noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq.*allowed is 1"),
        ({"hidden_act": "gelu"}, "hidden_act.*allowed is silu"),
        ({"n_group": 7}, "n_group.*must divide n_routed_experts=256"),
        ({"n_group": 256}, "n_group.*groups of 2 or more"),
        ({"topk_group": 9}, "topk_group.*allowed is 1 to n_group=8"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok.*4 groups have 128 experts"),
        ({"num_key_value_heads": 8}, "must be num_attention_heads=128; drop the key"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim.*even"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config.*quant_method fp8",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.*default and yarn"),
        ({"model_type": "kimi", "architectures": None}, "model_type.*allowed: deepseek_v3"),
    ],
)
def test_what_cannot_run_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        parse_arch(PUBLISHED | keys, origin="config.json")


def test_sizes_that_follow_from_others_may_only_repeat_them():
    parse_arch(PUBLISHED | {"head_dim": 64, "qk_head_dim": 192})
    with pytest.raises(ConfigError, match="head_dim=128: must be qk_rope_head_dim=64"):
        parse_arch(PUBLISHED | {"head_dim": 128})
    # In a file it is ignored: there are some with the size of another model.
    parse_arch(PUBLISHED | {"head_dim": 128}, origin="config.json")


def test_other_models_of_this_architecture_may_have_a_type_of_their_own():
    assert parse_arch(PUBLISHED | {"model_type": "kimi_k2"}, origin="config.json")


def test_layers_for_further_tokens_can_be_none():
    arch = parse_arch(PUBLISHED | {"num_nextn_predict_layers": 0}, origin="config.json")
    assert mtp_tensors(arch) == {} and arch.num_mtp_parameters_of_rank(ParallelLayout()) == 0


def test_the_model_names_all_tensors_that_transformers_saves():
    config = DeepseekV3Config(**{k: v for k, v in PUBLISHED.items() if "config" not in k})
    config.num_hidden_layers, config.n_routed_experts = 4, 16
    with torch.device("meta"):
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in DeepseekV3ForCausalLM(config).state_dict().items()
        }
    arch = parse_arch(PUBLISHED | {"num_hidden_layers": 4, "n_routed_experts": 16}, origin="file")
    ours = main_tensors(arch)
    # transformers joins experts in memory and splits them on saving.
    assert {k: v for k, v in ours.items() if ".experts." not in k} == {
        k: v for k, v in shapes.items() if ".experts." not in k
    }
