"""Models with experts over real ranks: uneven DP ranks, the load of experts, its forced balance.

That they equal transformers at every split is in test_families.py.
"""

import numpy as np
import pytest

from inferkit.core.place import RankPlace
from tests.e2e.equality import assert_same_tokens
from tests.parallel.matrix import NUM_NEW_TOKENS, prompts, shortened
from tests.parallel.moe_cases import generate_and_count
from tests.parallel.splits import SPLITS

TOP_K, NUM_EXPERTS = 2, 8


def overrides_of(directory, family, *overrides: str) -> list[str]:
    return [
        f"model={family}",
        f"model.path={directory}",
        "model.dtype=float32",
        "scheduler.batch_size=16",
        "engine.max_model_len=72",
        *overrides,
    ]


@pytest.mark.parametrize(
    "family,split,num_prompts",
    [("qwen3_moe", "dp2", 1), ("mixtral", "ep2", 1), ("qwen3_moe", "dp2tp2", 1)]
    + [
        pytest.param("mixtral", split, num_prompts, marks=pytest.mark.full)
        for split in ("dp2", "ep4", "dp2tp2", "wide", "crossed", "cp4")
        for num_prompts in (1, 3)
    ],
)
def test_ranks_without_requests_run_as_many_steps(ranks, references, family, split, num_prompts):
    """Decodes of unequal number too: one DP rank has finished before the other one has."""
    _, directory, reference = references(family)
    expected = shortened(reference)[-num_prompts:]
    world_size, overrides = SPLITS[split]
    outputs = ranks(world_size).run(
        generate_and_count,
        overrides_of(directory, family, *overrides),
        prompts()[-num_prompts:],
        NUM_NEW_TOKENS,
    )
    assert len({output["num_forwards"] for output in outputs}) == 1
    assert outputs[0]["num_forwards"] >= NUM_NEW_TOKENS
    for ours, (tokens, gaps, _) in zip(outputs[0]["tokens"], expected, strict=True):
        assert_same_tokens(ours, tokens, gaps, case=f"{family} {split}")


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(name, marks=[] if name in ("tp2", "dp2", "dp2tp2") else pytest.mark.full)
        for name in SPLITS
        if name != "tp3"
    ],
)
def test_the_load_of_experts_does_not_depend_on_the_split(ranks, tiny_hf_model, split):
    """Neither copies of tokens on other ranks nor dummy batches count."""
    directory = tiny_hf_model("qwen3_moe")
    world_size, overrides = SPLITS[split]
    alone = generate_and_count(
        RankPlace(), overrides_of(directory, "qwen3_moe"), prompts(), NUM_NEW_TOKENS
    )
    outputs = ranks(world_size).run(
        generate_and_count,
        overrides_of(directory, "qwen3_moe", *overrides),
        prompts(),
        NUM_NEW_TOKENS,
    )
    for output in outputs:
        assert output["load"] == outputs[0]["load"]
        assert list(output["load"]) == [0, 1]
    for layer, counts in outputs[0]["load"].items():
        assert sum(counts) == TOP_K * outputs[0]["num_computed_tokens"]
        # A token whose best experts are nearly tied may choose another one.
        moved = np.abs(np.subtract(counts, alone["load"][layer])).sum()
        assert moved <= 4, f"layer {layer}: {counts}, on one rank {alone['load'][layer]}"


def test_a_layer_without_experts_has_no_load(tiny_hf_model):
    directory = tiny_hf_model("qwen3_moe", num_hidden_layers=3, decoder_sparse_step=2)
    overrides = overrides_of(directory, "qwen3_moe")
    output = generate_and_count(RankPlace(), overrides, prompts()[:2], 2)
    assert list(output["load"]) == [1]
    directory = tiny_hf_model("llama")
    output = generate_and_count(RankPlace(), overrides_of(directory, "llama"), prompts()[:2], 2)
    assert output["load"] is None


@pytest.mark.parametrize("split", ["dp2", "ep2", pytest.param("dp2tp2", marks=pytest.mark.full)])
def test_forced_balance_loads_all_experts_equally(ranks, tiny_hf_model, split):
    """In steps with prompts (exact dispatch) as in decodes (fixed dispatch)."""
    directory = tiny_hf_model("qwen3_moe")
    world_size, overrides = SPLITS[split]
    # A multiple of E pairs in each step and on each rank.
    same_length = [[5 + idx] * 8 for idx in range(16)]
    outputs = ranks(world_size).run(
        generate_and_count,
        overrides_of(directory, "qwen3_moe", "model.force_eplb=true", *overrides),
        same_length,
        NUM_NEW_TOKENS,
        True,  # ignore_eos
    )
    num_pairs = TOP_K * outputs[0]["num_computed_tokens"]
    for counts in outputs[0]["load"].values():
        assert counts == [num_pairs // NUM_EXPERTS] * NUM_EXPERTS
