"""Who works with whom, at every size up to a thousand ranks, and who holds which heads."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferkit.core.parallel_layout import (
    TP_SIZES,
    HeadLayout,
    ParallelLayout,
    contiguous,
    layout_faults,
    padded_size,
    strided,
)

PAIRS_OF_8 = ((0, 1), (2, 3), (4, 5), (6, 7))
WORLD_OF_8 = (tuple(range(8)),)


def tp(size: int, **sizes: int) -> dict[str, int]:
    """Keywords of a layout in which all TP sizes are `size`, beside those given."""
    return {f"{kind}_tp_size": size for kind in TP_SIZES} | sizes


def faults(**sizes: int) -> list[str]:
    parallel = SimpleNamespace(**({"world_size": 1, "cp_size": 1} | tp(1) | sizes))
    return [str(fault) for fault in layout_faults(parallel)]


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def layouts(draw: st.DrawFn, max_world_size: int = 1024) -> ParallelLayout:
    world_size = draw(st.integers(1, max_world_size))
    if draw(st.booleans()):
        return ParallelLayout(world_size=world_size, cp_size=world_size)
    attn = draw(st.sampled_from(divisors(world_size)))
    nested = [n for n in divisors(world_size) if n % attn == 0 or attn % n == 0]
    sizes = {f"{kind}_tp_size": draw(st.sampled_from(nested)) for kind in TP_SIZES}
    return ParallelLayout(world_size=world_size, **sizes | {"attn_tp_size": attn})


# The vectors of the reference.


def test_derived_sizes() -> None:
    layout = ParallelLayout(world_size=8, attn_tp_size=2, moe_tp_size=2, embed_tp_size=8)

    assert layout.attn_dp_size == 4
    assert layout.moe_ep_size == 4
    assert layout.embed_dp_size == 1


def test_groups_of_eight_ranks() -> None:
    layout = ParallelLayout(
        world_size=8, attn_tp_size=2, moe_tp_size=2, embed_tp_size=8, lmhead_tp_size=2
    )

    assert layout.partitions == {
        "attn_tp_group": PAIRS_OF_8,
        "lmhead_tp_group": PAIRS_OF_8,
        "moe_tp_group": PAIRS_OF_8,
        "embed_tp_group": WORLD_OF_8,
        "moe_ep_group": ((0, 2, 4, 6), (1, 3, 5, 7)),
        "moe_ep_group_mc2": ((0, 2, 4, 6), (1, 3, 5, 7)),
        "dp_group": ((0, 2, 4, 6), (1, 3, 5, 7)),
        "tp_cpu_group": PAIRS_OF_8,
        "dp_leader_group": ((0, 2, 4, 6), (1,), (3,), (5,), (7,)),
    }


def test_one_rank_has_no_group() -> None:
    assert ParallelLayout().partitions == {}


def test_four_ranks_of_two_by_two() -> None:
    """The case in which the reference pairs ranks 0 and 3."""
    layout = ParallelLayout(world_size=4, attn_tp_size=2)

    assert layout.partitions["tp_cpu_group"] == ((0, 1), (2, 3))
    assert layout.partitions["dp_leader_group"] == ((0, 2), (1,), (3,))


def test_context_parallel_ranks_are_one_group() -> None:
    partitions = ParallelLayout(world_size=4, cp_size=4).partitions

    assert partitions["cp_group"] == ((0, 1, 2, 3),)
    assert partitions["tp_cpu_group"] == ((0, 1, 2, 3),)
    assert "dp_leader_group" not in partitions
    assert "attn_tp_group" not in partitions


def test_ranks_that_compute_together_the_tokens_of_several_dp_ranks() -> None:
    layout = ParallelLayout(world_size=8, attn_tp_size=2, embed_tp_size=4, lmhead_tp_size=8)

    assert layout.dp_span("attn") == 1
    assert layout.dp_span("embed") == 2
    assert layout.dp_partition("embed") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.dp_partition("lmhead") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert layout.dp_partition("dense") == tuple((rank,) for rank in range(8))


# What cannot be.


@pytest.mark.parametrize("name", [*(f"{kind}_tp_size" for kind in TP_SIZES), "cp_size"])
def test_a_size_that_does_not_divide_names_both_numbers(name: str) -> None:
    problem = f"{name}=3 does not divide world_size=8; allowed is 1, 2, 4, 8"

    assert faults(**{"world_size": 8, name: 3}) == [problem]
    with pytest.raises(ValueError, match=problem):
        ParallelLayout(world_size=8, **{name: 3})


@pytest.mark.parametrize("size", [0, -1, 16])
def test_a_size_that_is_no_share(size: int) -> None:
    (fault,) = faults(world_size=8, dense_tp_size=size)

    assert fault == f"dense_tp_size={size} does not divide world_size=8; allowed is 1, 2, 4, 8"


@pytest.mark.parametrize("world_size", [0, -4])
def test_a_world_without_ranks(world_size: int) -> None:
    assert faults(world_size=world_size, attn_tp_size=2) == [
        f"world_size={world_size} is out of range; allowed is >= 1"
    ]


def test_all_faults_come_at_once() -> None:
    found = faults(world_size=8, attn_tp_size=3, cp_size=5)

    assert [fault.split("=")[0] for fault in found] == ["attn_tp_size", "cp_size"]


@pytest.mark.parametrize("attn_tp_size", [2, 4])
def test_sizes_nest(attn_tp_size: int) -> None:
    (fault,) = faults(world_size=12, attn_tp_size=attn_tp_size, dense_tp_size=3)

    assert fault == (
        f"dense_tp_size=3 and attn_tp_size={attn_tp_size} do not nest; one must be a multiple "
        "of the other"
    )
    assert faults(world_size=12, attn_tp_size=attn_tp_size, dense_tp_size=12) == []
    assert faults(world_size=12, attn_tp_size=attn_tp_size, dense_tp_size=1) == []


def test_context_parallelism_takes_all_ranks_and_no_attention_tp() -> None:
    assert faults(world_size=8, cp_size=8) == []
    assert faults(world_size=8, cp_size=4) == [
        "cp_size=4 must be 1 or equal world_size=8 (all ranks)"
    ]
    (fault,) = faults(world_size=8, cp_size=8, attn_tp_size=2)
    assert fault.startswith("attn_tp_size=2 must be 1 with cp_size=8")


def test_a_layout_of_a_parallel_node() -> None:
    node: Any = SimpleNamespace(world_size=4, cp_size=1, node_ips=[], **tp(2, moe_tp_size=1))

    assert ParallelLayout.of(node) == ParallelLayout(world_size=4, **tp(2, moe_tp_size=1))


# Membership, at any size.


@settings(deadline=None)
@given(layouts())
def test_every_rank_is_in_one_group_of_each_partition(layout: ParallelLayout) -> None:
    for name, groups in layout.partitions.items():
        members = sorted(rank for ranks in groups for rank in ranks)
        assert members == list(range(layout.world_size)), name
        assert all(list(ranks) == sorted(ranks) for ranks in groups), name


@settings(deadline=None)
@given(layouts())
def test_groups_have_the_size_of_their_name(layout: ParallelLayout) -> None:
    sizes = {f"{kind}_tp_group": layout.tp_size(kind) for kind in TP_SIZES}
    sizes |= {
        "moe_ep_group": layout.moe_ep_size,
        "moe_ep_group_mc2": layout.moe_ep_size,
        "cp_group": layout.cp_size,
        "dp_group": layout.attn_dp_size,
        "tp_cpu_group": layout.attn_tp_size * layout.cp_size,
    }
    found = layout.partitions

    for name, size in sizes.items():
        assert (name in found) == (size > 1), name
        assert {len(ranks) for ranks in found.get(name, ())} <= {size}, name


@settings(deadline=None)
@given(layouts())
def test_expert_parallel_ranks_are_strided(layout: ParallelLayout) -> None:
    partitions, stride = layout.partitions, layout.moe_tp_size
    for start, ranks in enumerate(partitions.get("moe_ep_group", ())):
        assert ranks == tuple(range(start, layout.world_size, stride))
    assert partitions.get("moe_ep_group") == partitions.get("moe_ep_group_mc2")


@settings(deadline=None)
@given(layouts())
def test_a_tp_and_an_ep_group_meet_in_one_rank(layout: ParallelLayout) -> None:
    """So each rank holds one share of one set of experts, and all shares are held."""
    tp_groups = contiguous(layout.world_size, layout.moe_tp_size)
    ep_groups = strided(layout.world_size, layout.moe_ep_size)

    held = {rank: (idx, ranks.index(rank)) for idx, ranks in enumerate(tp_groups) for rank in ranks}
    for tp_rank, ranks in enumerate(ep_groups):
        assert [held[rank] for rank in ranks] == [(idx, tp_rank) for idx in range(len(tp_groups))]


@settings(deadline=None)
@given(layouts())
def test_tp_groups_nest_in_dp_ranks_or_hold_whole_ones(layout: ParallelLayout) -> None:
    for kind in TP_SIZES:
        for ranks in contiguous(layout.world_size, layout.tp_size(kind)):
            dp_ranks = {layout.dp_rank(rank) for rank in ranks}
            assert len(dp_ranks) == layout.dp_span(kind)
            if layout.tp_size(kind) >= layout.attn_tp_size:
                assert len(ranks) == len(dp_ranks) * layout.attn_tp_size


@settings(deadline=None)
@given(layouts())
def test_a_dp_rank_is_an_attention_group(layout: ParallelLayout) -> None:
    for dp_rank, ranks in enumerate(contiguous(layout.world_size, layout.attn_tp_size)):
        assert {layout.dp_rank(rank) for rank in ranks} == {dp_rank}
        assert [layout.attn_tp_rank(rank) for rank in ranks] == list(range(layout.attn_tp_size))


@settings(deadline=None)
@given(layouts())
def test_leaders_are_the_first_ranks_of_their_groups(layout: ParallelLayout) -> None:
    size = layout.attn_tp_size * layout.cp_size
    leaders = tuple(ranks[0] for ranks in contiguous(layout.world_size, size))

    groups = layout.partitions.get("dp_leader_group")
    if len(leaders) > 1:
        assert groups is not None
        assert groups[0] == leaders
        assert all(len(ranks) == 1 for ranks in groups[1:])
    else:
        assert groups is None


@settings(deadline=None)
@given(layouts())
def test_dp_groups_join_equal_shares_of_the_attention(layout: ParallelLayout) -> None:
    for ranks in layout.partitions.get("dp_group", ()):
        assert len({layout.attn_tp_rank(rank) for rank in ranks}) == 1
        assert [layout.dp_rank(rank) for rank in ranks] == list(range(layout.attn_dp_size))


@settings(deadline=None)
@given(layouts(), st.sampled_from(TP_SIZES))
def test_dp_partition_has_one_rank_of_each_dp_rank_of_a_group(
    layout: ParallelLayout, kind: str
) -> None:
    groups = layout.dp_partition(kind)
    group_of = {
        rank: idx
        for idx, ranks in enumerate(contiguous(layout.world_size, layout.tp_size(kind)))
        for rank in ranks
    }

    assert sorted(rank for ranks in groups for rank in ranks) == list(range(layout.world_size))
    for ranks in groups:
        assert len({layout.attn_tp_rank(rank) for rank in ranks}) == 1
        dp_ranks = [layout.dp_rank(rank) for rank in ranks]
        assert dp_ranks == list(range(dp_ranks[0], dp_ranks[0] + layout.dp_span(kind)))
        if len(ranks) > 1:
            assert len({group_of[rank] for rank in ranks}) == 1


# Heads.


@pytest.mark.parametrize(
    ("tp_size", "padded_kv_heads", "padded_heads"),
    [(1, 3, 9), (2, 4, 12), (3, 3, 9), (4, 4, 12), (8, 4, 16), (16, 4, 16)],
)
def test_heads_of_the_default_model(tp_size: int, padded_kv_heads: int, padded_heads: int) -> None:
    layout = HeadLayout(num_heads=9, num_kv_heads=3, tp_size=tp_size)

    assert layout.padded_kv_heads == padded_kv_heads
    assert layout.padded_heads == padded_heads


def test_padding_in_place() -> None:
    layout = HeadLayout(num_heads=9, num_kv_heads=3, tp_size=8)

    assert layout.num_replicas == 2
    assert [layout.kv_heads(rank) for rank in range(8)] == [
        [0], [0], [1], [1], [2], [2], [None], [None],
    ]  # fmt: skip
    assert [layout.heads(rank) for rank in range(8)] == [
        [0, 1], [2, None], [3, 4], [5, None], [6, 7], [8, None], [None, None], [None, None],
    ]  # fmt: skip


@st.composite
def head_layouts(draw: st.DrawFn) -> HeadLayout:
    num_kv_heads = draw(st.integers(1, 40))
    num_heads = num_kv_heads * draw(st.integers(1, 17))
    return HeadLayout(
        num_heads=num_heads, num_kv_heads=num_kv_heads, tp_size=draw(st.integers(1, 130))
    )


@settings(deadline=None)
@given(head_layouts())
def test_every_real_head_is_held_once(layout: HeadLayout) -> None:
    held = [head for rank in range(layout.tp_size) for head in layout.heads(rank)]

    assert len(held) == layout.padded_heads
    assert sorted(head for head in held if head is not None) == list(range(layout.num_heads))


@settings(deadline=None)
@given(head_layouts())
def test_every_kv_head_is_held_by_as_many_ranks_as_share_it(layout: HeadLayout) -> None:
    held = Counter(head for rank in range(layout.tp_size) for head in layout.kv_heads(rank))

    assert {head: count for head, count in held.items() if head is not None} == {
        head: layout.num_replicas for head in range(layout.num_kv_heads)
    }


@settings(deadline=None)
@given(head_layouts())
def test_query_heads_lie_with_their_kv_head(layout: HeadLayout) -> None:
    for rank in range(layout.tp_size):
        heads, kv_heads = layout.heads(rank), layout.kv_heads(rank)
        assert len(heads) == layout.num_local_heads
        assert len(kv_heads) == layout.num_local_kv_heads
        share = len(heads) // len(kv_heads)
        for idx, head in enumerate(heads):
            if head is not None:
                assert kv_heads[idx // share] == head // layout.heads_per_kv_head


@settings(deadline=None)
@given(head_layouts())
def test_padding_is_the_smallest(layout: HeadLayout) -> None:
    kv_heads, tp_size = layout.padded_kv_heads, layout.tp_size
    counts = range(layout.num_kv_heads, kv_heads + 1)

    assert [n for n in counts if n % tp_size == 0 or tp_size % n == 0] == [kv_heads]
    per_kv_head = layout.padded_heads // kv_heads
    assert per_kv_head % layout.num_replicas == 0
    assert 0 <= per_kv_head - layout.heads_per_kv_head < layout.num_replicas


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 200))
def test_padded_size(size: int, tp_size: int) -> None:
    padded = padded_size(size, tp_size)

    assert padded == math.ceil(size / tp_size) * tp_size
    assert padded % tp_size == 0
