"""Dense families at every split equal transformers, in float32 (the equality matrix)."""

import pytest

from tests.parallel.matrix import References, check
from tests.parallel.splits import SPLITS

FAMILIES = {
    "llama": ("llama", {}),
    "llama_tied_biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "qwen2_half_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    # As many heads as the default model: none of the splits divides them.
    "qwen3_nine_heads": (
        "qwen3",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 130},
    ),
}
COVER = {
    ("llama", "tp2"),
    ("llama", "crossed"),
    ("llama_tied_biases", "narrow"),
    ("llama_tied_biases", "dp2tp2"),
    ("mistral_window", "cp2"),
    ("qwen2_half_window", "wide"),
    ("qwen2_half_window", "dp2"),
    ("qwen3_nine_heads", "tp4"),
    ("qwen3_nine_heads", "cp4"),
    ("qwen3_nine_heads", "tp3"),
}
CELLS = [
    pytest.param(name, split, marks=[] if (name, split) in COVER else pytest.mark.full)
    for name in FAMILIES
    for split in SPLITS
]


@pytest.fixture(scope="module")
def reference(tiny_hf_model):
    return References(tiny_hf_model)


@pytest.mark.parametrize("name,split", CELLS)
def test_a_dense_family_equals_transformers(ranks, reference, name, split):
    family, config = FAMILIES[name]
    world_size, overrides = SPLITS[split]
    outputs = check(ranks(world_size), family, reference(family, **config), overrides)
    # Ranks wait for each other only where a layer computes tokens of several DP ranks.
    is_lock_step = split in ("wide", "crossed", "cp2", "cp4")
    assert {output["is_lock_step"] for output in outputs} == {is_lock_step}
