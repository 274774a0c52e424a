"""gpt-oss at every split equals transformers, in float32."""

from typing import Any

import pytest

from tests.e2e.equality import hf_generate
from tests.models.gpt_oss.mxfp4 import make_mxfp4_pair
from tests.parallel.matrix import NUM_NEW_TOKENS, References, check, prompts
from tests.parallel.splits import SPLITS

MODELS: dict[str, dict[str, Any]] = {
    "even": {},
    # Heads are replicated, padded, or both.
    "uneven": {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 20},
}
IN_DEFAULT_SUITE = {("uneven", "tp2"), ("even", "tp3"), ("uneven", "ep4"), ("even", "dp2tp2")}
CELLS = [
    pytest.param(name, split, marks=[] if (name, split) in IN_DEFAULT_SUITE else pytest.mark.full)
    for name in MODELS
    for split in SPLITS
]


@pytest.fixture(scope="module")
def reference(tiny_hf_model):
    return References(tiny_hf_model)


@pytest.mark.parametrize(("name", "split"), CELLS)
def test_gpt_oss_equals_transformers(ranks, reference, name, split):
    world_size, overrides = SPLITS[split]
    check(ranks(world_size), "gpt_oss", reference("gpt_oss", **MODELS[name]), overrides)


@pytest.mark.full
@pytest.mark.parametrize("split", ["tp3", "ep2", "tp4"])
def test_mxfp4_experts_equal_transformers(ranks, tiny_hf_model, tmp_path_factory, split):
    mxfp4, plain = make_mxfp4_pair(tiny_hf_model, tmp_path_factory)
    world_size, overrides = SPLITS[split]
    expected = hf_generate(plain, prompts(), NUM_NEW_TOKENS)
    check(ranks(world_size), "gpt_oss", (mxfp4, expected), overrides)
