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


SLIDING, FULL = "sliding_attention", "full_attention"

FAMILIES: dict[str, Family] = {
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
            # None of the splits divides them.
            "gemma3_nine_heads": {
                "hidden_size": 72,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "intermediate_size": 130,
            },
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
                ("gemma3", "tp2"),
                ("gemma3", "dp2"),
                ("gemma3_one_kv_head", "cp2"),
                ("gemma3_one_kv_head", "tp4"),
                ("gemma3_nine_heads", "tp3"),
                ("gemma3_nine_heads", "tp4"),
                ("gemma3_untied_biases_long", "crossed"),
            }
        ),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        config_class="MixtralConfig",
        config={"num_local_experts": 8, "num_experts_per_tok": 2},
        variants={
            "mixtral": {},
            # None of the splits divides the heads or the experts' inner size.
            "mixtral_nine_heads": {
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "intermediate_size": 70,
            },
            "mixtral_window": {"sliding_window": 7, "num_experts_per_tok": 1},
        },
        cover=frozenset(
            {
                ("mixtral", "wide"),
                ("mixtral_nine_heads", "tp4"),
                ("mixtral_nine_heads", "tp3"),
                ("mixtral_window", "ep2"),
                ("mixtral_window", "crossed"),
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
                ("qwen3_moe", "ep4"),
                ("qwen3_moe", "dp2tp2"),
                ("qwen3_moe", "cp2"),
                ("qwen3_moe_sparse", "dp2"),
                ("qwen3_moe_window", "narrow"),
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
