"""`parallel=tp16` against `parallel=dp8tp2` of Qwen3-235B-A22B, every derived number by hand.

The sizes are those of https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json; no number
below comes from inferkit.
"""

from typing import Any

import pytest

from inferkit.config.space import ConfigSpace
from inferkit.inspect.diff.compare import Comparison, compare
from inferkit.inspect.diff.sources import take_side

VOCABULARY, HIDDEN, LAYERS = 151936, 4096, 94
HEADS, KV_HEADS, HEAD_DIM = 64, 4, 128
EXPERTS, EXPERT_SIZE = 128, 1536
BFLOAT16 = 2

# 16 ranks: of 64 query heads 4 each; 4 KV heads lie on 4 ranks each, so that every rank has 1;
# of each of the 128 experts 1536 / 16 = 96 columns; 151936 / 16 = 9496 rows of the vocabulary.
TP16_LAYER = (
    4096 * (4 * 128)  # query
    + 2 * 4096 * (1 * 128)  # key, value
    + (4 * 128) * 4096  # output
    + 2 * 128  # norms of query and key heads
    + 2 * 4096  # norms before attention and experts
    + 128 * 4096  # router, whole on every rank
    + 128 * 3 * 4096 * 96  # gate, up and down of every expert
)
TP16 = 94 * TP16_LAYER + 2 * 9496 * 4096 + 4096  # embedding, output, last norm

# 8 sets of 2 ranks: of 64 query heads 32, of 4 KV heads 2; 128 / 16 = 8 whole experts;
# 151936 / 2 = 75968 rows of the vocabulary.
DP8TP2_LAYER = (
    4096 * (32 * 128)
    + 2 * 4096 * (2 * 128)
    + (32 * 128) * 4096
    + 2 * 128
    + 2 * 4096
    + 128 * 4096
    + 8 * 3 * 4096 * 1536
)
DP8TP2 = 94 * DP8TP2_LAYER + 2 * 75968 * 4096 + 4096

# All of it: 235.09 billion, of which the model has its name.
WHOLE_LAYER = (
    2 * HIDDEN * HEADS * HEAD_DIM
    + 2 * HIDDEN * KV_HEADS * HEAD_DIM
    + 2 * HEAD_DIM
    + 2 * HIDDEN
    + EXPERTS * HIDDEN
    + EXPERTS * 3 * HIDDEN * EXPERT_SIZE
)
WHOLE = LAYERS * WHOLE_LAYER + 2 * VOCABULARY * HIDDEN + HIDDEN

# Keys and values of 94 layers in 2 bytes a number; blocks of 128 tokens.
TP16_TOKEN = 94 * 2 * (1 * 128) * BFLOAT16
DP8TP2_TOKEN = 94 * 2 * (2 * 128) * BFLOAT16
# A request has at most 256 + 32 = 288 tokens: 3 blocks; a DP rank has 32, and the null block.
BLOCKS = 32 * 3 + 1

ALL = [list(range(16))]
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
ALONE = [[rank] for rank in range(16)]

CHANGED: dict[str, tuple[Any, Any]] = {
    "parallel.attn_dp_size": (16 // 16, 16 // 2),
    "parallel.moe_ep_size": (16 // 16, 16 // 1),
    "parallel.embed_dp_size": (16 // 16, 16 // 2),
    "groups.attn_tp_group": (ALL, PAIRS),
    "groups.embed_tp_group": (ALL, PAIRS),
    "groups.lmhead_tp_group": (ALL, PAIRS),
    "groups.dense_tp_group": (ALL, PAIRS),
    "groups.shared_tp_group": (ALL, PAIRS),
    "groups.o_proj_tp_group": (ALL, PAIRS),
    "groups.moe_tp_group": (ALL, ALONE),
    "groups.moe_ep_group": (ALONE, ALL),
    "groups.moe_ep_group_mc2": (ALONE, ALL),
    # The ranks with the same share of the attention: 0 of every pair, and 1 of every pair.
    "groups.dp_group": (
        ALONE,
        [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]],
    ),
    "groups.tp_cpu_group": (ALL, PAIRS),
    "rank.heads": (4, 32),
    "rank.kv_heads": (1, 2),
    "rank.experts": (128, 8),
    "rank.parameters": (14_814_227_968, 18_217_184_768),
    "rank.weight_bytes": (2 * 14_814_227_968, 2 * 18_217_184_768),
    "rank.kv_bytes_per_token": (48_128, 96_256),
    "kv_cache.block_bytes": (128 * 48_128, 128 * 96_256),
    "kv_cache.pool_bytes": (97 * 128 * 48_128, 97 * 128 * 96_256),
    "kv_cache.concurrent_requests": (96 // 3 * 1, 96 // 3 * 8),
}
EQUAL = {
    "parallel.ranks_per_node": 16,
    "scheduler.batch_size_per_dp_rank": 32,
    "model.parameters": 235_093_634_560,
    "kv_cache.blocks_per_request": 3,
    "kv_cache.blocks_wanted": 97,
    "kv_cache.blocks": 97,
    "groups.cp_group": ALONE,
}


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    space = ConfigSpace()
    model = "model=qwen3_235b_a22b"
    sides = (take_side(f"{model} parallel={name}", space) for name in ("tp16", "dp8tp2"))
    return compare(*sides)


def test_the_arithmetic_by_hand_is_that_of_the_formulas() -> None:
    assert TP16 == 14_814_227_968
    assert DP8TP2 == 18_217_184_768
    assert WHOLE == 235_093_634_560
    assert (TP16_TOKEN, DP8TP2_TOKEN) == (48_128, 96_256)
    assert BLOCKS == 97


def test_what_differs_and_nothing_else(comparison: Comparison) -> None:
    found = {pair.name: pair for pair in comparison.derived}
    leaders = found.pop("groups.dp_leader_group")

    values = {
        name: (pair.left.value, pair.right.value)
        for name, pair in found.items()
        if pair.left is not None and pair.right is not None
    }
    assert values == CHANGED
    # The first rank of every set; the others are in no group of leaders.
    assert leaders.left is not None and leaders.right is not None
    assert [ranks for ranks in leaders.left.value if len(ranks) > 1] == []
    assert [ranks for ranks in leaders.right.value if len(ranks) > 1] == [
        [0, 2, 4, 6, 8, 10, 12, 14]
    ]


def test_the_other_derived_values_are_equal(comparison: Comparison) -> None:
    for side in (comparison.left, comparison.right):
        known = {one.name: one.value for one in side.derived}
        assert {name: known[name] for name in EQUAL} == EQUAL
        assert set(known) == {*EQUAL, *CHANGED, "groups.dp_leader_group"}


def test_formulas_hold_the_numbers(comparison: Comparison) -> None:
    found = {one.name: one.formula for one in comparison.right.derived}

    assert found["parallel.attn_dp_size"] == "world_size / attn_tp_size = 16 / 2"
    assert "= 128 / 16" in found["rank.experts"]
    assert "18,217,184,768 * 2" in found["rank.weight_bytes"]
    assert "96,256 * 128" in found["kv_cache.block_bytes"]
    assert "32 * 3 + 1" in found["kv_cache.blocks_wanted"]
