"""Families of models that prove themselves by one entry here (models/README.md).

For each entry, tests/models/test_families.py compares what `arch.py` says with transformers and
with the model itself, tests/e2e/test_families.py runs every schedule, and
tests/parallel/test_families.py every split.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Family:
    """One option of conf/model, and the tiny models of it that tests compare with transformers."""

    architecture: str
    """The class, of the same name in transformers and in the folder of the family."""
    config_class: str
    """Its configuration class in transformers."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of all its tiny models, beside or instead of those of `save_tiny_model`."""
    variants: Mapping[str, Mapping[str, Any]]
    """Name -> further keys. Together they hold whatever makes layers differ; the first one runs
    every schedule, so it should have each kind of layer."""
    cover: frozenset[tuple[str, str]]
    """(variant, split of tests/parallel/splits.py) in the default suite; all others are `full`."""
    prepare: Callable[[Any], None] | None = None
    """Changes the model of transformers, in place, where its initialisation leaves zeros or ones
    that would hide a parameter. Those of one dimension are no longer so when this is called."""


def random_expert_biases(model: Any) -> None:
    """Biases that decide with the scores, which transformers keeps as buffers of zeros."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)


def larger_biases_and_sinks(model: Any) -> None:
    """Biases of experts have two dimensions and are zeros; small sinks would hardly be seen."""
    for name, parameter in model.named_parameters():
        if name.endswith(("_proj_bias", ".sinks")):
            parameter.add_(parameter.clone().normal_(), alpha=0.5)


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Unequal, so that both the scores and the rotated parts have a temperature.
DEEPSEEK_YARN: dict[str, Any] = {**YARN, "mscale": 1.3, "mscale_all_dim": 0.8}
SLIDING, FULL = "sliding_attention", "full_attention"
NINE_HEADS: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3}
"""None of the splits divides them."""

FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        config_class="DeepseekV3Config",
        config={
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            # transformers takes the size of the rotated part from here.
            "head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "n_shared_experts": 2,
        },
        variants={
            "deepseek_v3": {},
            "deepseek_direct_queries_biases": {
                "q_lora_rank": None,
                "rope_interleave": False,
                "attention_bias": True,
            },
            "deepseek_yarn": {"rope_parameters": DEEPSEEK_YARN, "max_position_embeddings": 128},
            "deepseek_five_heads_tied_yarn": {
                "num_attention_heads": 5,
                "num_key_value_heads": 5,
                "q_lora_rank": None,
                "rope_parameters": DEEPSEEK_YARN,
                "max_position_embeddings": 128,
                "tie_word_embeddings": True,
            },
            "deepseek_one_group": {
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": False,
                "routed_scaling_factor": 1.7,
                "n_shared_experts": 1,
                # The norms of latents have one of their own.
                "rms_norm_eps": 0.01,
                "first_k_dense_replace": 0,
                "num_hidden_layers": 2,
            },
            # Within the limits of the NPU's operators for latent attention.
            "deepseek_npu_sized": {
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 64,
                "head_dim": 64,
                "v_head_dim": 32,
                "num_hidden_layers": 2,
                # Sums over larger latents would make the logits many times as large.
                "initializer_range": 0.08,
            },
        },
        cover=frozenset(
            {
                ("deepseek_v3", "ep4"),
                ("deepseek_direct_queries_biases", "narrow"),
                ("deepseek_yarn", "cp2"),
                ("deepseek_five_heads_tied_yarn", "tp3"),
            }
        ),
        prepare=random_expert_biases,
    ),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        config_class="Gemma3TextConfig",
        config={
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING],
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": True,
        },
        variants={
            "gemma3": {},
            # As the smallest published ones: fewer KV heads than ranks.
            "gemma3_one_kv_head": {"num_key_value_heads": 1},
            "gemma3_nine_heads": {**NINE_HEADS, "hidden_size": 72, "intermediate_size": 130},
            "gemma3_untied_biases_long": {
                "tie_word_embeddings": False,
                "attention_bias": True,
                "rope_parameters": {
                    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        },
        cover=frozenset(
            {
                ("gemma3", "dp2"),
                ("gemma3_one_kv_head", "cp2"),
                ("gemma3_nine_heads", "tp2"),
                ("gemma3_untied_biases_long", "crossed"),
            }
        ),
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        config_class="GptOssConfig",
        config={
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            # Experts do not divide by three; the limit is one that these activations reach.
            "intermediate_size": 44,
            "swiglu_limit": 0.5,
            "sliding_window": 7,
            "max_position_embeddings": 128,
            "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
        },
        variants={
            "gpt_oss": {},
            "gpt_oss_nine_heads": {**NINE_HEADS, "intermediate_size": 20},
            # Keys of an earlier block than the window's first are never read.
            "gpt_oss_reversed": {"layer_types": [FULL, SLIDING], "sliding_window": 3},
            "gpt_oss_plain": {
                "layer_types": [FULL, FULL],
                "attention_bias": False,
                "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        cover=frozenset(
            {
                ("gpt_oss", "dp2tp2"),
                ("gpt_oss_nine_heads", "tp2"),
                ("gpt_oss_nine_heads", "ep4"),
                ("gpt_oss_reversed", "cp2"),
            }
        ),
        prepare=larger_biases_and_sinks,
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        config_class="LlamaConfig",
        variants={
            "llama": {},
            "llama_tied_biases": {
                "tie_word_embeddings": True,
                "attention_bias": True,
                "mlp_bias": True,
            },
            "llama3_rope": {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            "llama_dynamic_rope": {
                "max_position_embeddings": 40,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            },
        },
        cover=frozenset(
            {
                ("llama", "tp2"),
                ("llama", "cp2"),
                ("llama_tied_biases", "dp2tp2"),
                ("llama_tied_biases", "narrow"),
            }
        ),
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        config_class="MistralConfig",
        config={"sliding_window": None},
        variants={"mistral_window": {"sliding_window": 7}},
        cover=frozenset({("mistral_window", split) for split in ("tp2", "dp2", "cp2")}),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        config_class="MixtralConfig",
        config={"num_local_experts": 8, "num_experts_per_tok": 2},
        variants={
            "mixtral": {},
            # Three ranks do not divide the experts' inner size either.
            "mixtral_nine_heads": {**NINE_HEADS, "intermediate_size": 68},
            "mixtral_window": {"sliding_window": 7, "num_experts_per_tok": 1},
        },
        cover=frozenset(
            {
                ("mixtral", "wide"),
                ("mixtral_nine_heads", "tp4"),
                ("mixtral_window", "ep2"),
                ("mixtral_window", "cp2"),
                ("mixtral_window", "crossed"),
            }
        ),
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        config_class="Qwen2Config",
        variants={
            "qwen2_half_window": {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 1,
            },
            "qwen2_tied_yarn": {"tie_word_embeddings": True, "rope_parameters": YARN},
            "qwen2_yarn_beyond_its_positions": {
                "max_position_embeddings": 32,
                "rope_parameters": YARN,
            },
        },
        cover=frozenset(
            {
                ("qwen2_half_window", "wide"),
                ("qwen2_half_window", "dp2"),
                ("qwen2_half_window", "cp4"),
                ("qwen2_tied_yarn", "tp3"),
            }
        ),
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        config_class="Qwen3Config",
        variants={
            "qwen3": {},
            "qwen3_wide_heads": {"head_dim": 32, "num_key_value_heads": 4},
            "qwen3_nine_heads": {**NINE_HEADS, "intermediate_size": 130},
        },
        cover=frozenset(
            {
                ("qwen3_wide_heads", "dp2"),
                ("qwen3_nine_heads", "tp4"),
                ("qwen3_nine_heads", "cp4"),
            }
        ),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        config_class="Qwen3MoeConfig",
        config={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 44},
        variants={
            # By the step layers 0 and 2 have one MLP, by the list layer 3.
            "qwen3_moe_sparse": {
                "num_hidden_layers": 4,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [3],
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
            "qwen3_moe": {"norm_topk_prob": True},
            "qwen3_moe_window": {
                "use_sliding_window": True,
                "sliding_window": 7,
                "num_experts_per_tok": 3,
                "head_dim": 32,
            },
        },
        cover=frozenset(
            {
                ("qwen3_moe", "tp2"),
                ("qwen3_moe", "cp2"),
                ("qwen3_moe_sparse", "dp2"),
                ("qwen3_moe_window", "ep2"),
            }
        ),
    ),
}

VARIANTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    variant: (option, config)
    for option, family in FAMILIES.items()
    for variant, config in family.variants.items()
}
"""Variant -> (option, keys) as `tiny_hf_model` takes them; names are unique over all families."""
