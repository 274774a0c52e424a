"""The expert layer over real ranks equals the layer on one, wherever tokens and experts lie."""

import itertools

import pytest

from tests.parallel.moe_cases import NUM_EXPERTS, SKEWS, TOP_K, MoECase, chosen, run_case, run_cases

ATOL = 1e-5


def cases_of(world_size: int, attn_tp_size: int, moe_tp_size: int) -> list[MoECase]:
    """Prompts and decodes, each skew, few and uneven numbers of tokens."""
    dp_size = world_size // attn_tp_size
    few, many = (1,) * dp_size, (23, *(1, 9, 4) * dp_size)[:dp_size]
    return [
        MoECase(attn_tp_size, moe_tp_size, num_tokens, is_prefill, skew, is_packed=skew == "even")
        for num_tokens, is_prefill, skew in [
            *itertools.product([many], (True, False), SKEWS),
            # With one token some ranks bring none, and their experts get none.
            *itertools.product([few], (True, False), ["first"]),
        ]
    ]


def check(pool, cases: list[MoECase]) -> None:
    by_rank = pool.run(run_cases, cases)
    for idx, case in enumerate(cases):
        results = [of_rank[idx] for of_rank in by_rank]
        assert max(difference for difference, _, _ in results) < ATOL, case
        total = [sum(counts) for counts in zip(*(result[1] for result in results), strict=True)]
        assert total == chosen(case), case
        assert len({num_calls for _, _, num_calls in results}) == 1, f"{case}: lock-step"


def splits(world_size: int) -> list[tuple[int, int, int]]:
    """(ranks, attn_tp_size, moe_tp_size): pure TP, pure EP, both, below, equal and above."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return [(world_size, *pair) for pair in itertools.product(sizes, sizes)]


def test_one_rank_equals_the_definition():
    for case in cases_of(1, 1, 1):
        difference, counts, num_calls = run_case(0, 1, case)
        assert difference < ATOL and counts == chosen(case) and num_calls == 0


@pytest.mark.parametrize("world_size,attn_tp_size,moe_tp_size", [*splits(2), *splits(4)])
def test_any_split_equals_one_rank(ranks, world_size, attn_tp_size, moe_tp_size):
    check(ranks(world_size), cases_of(world_size, attn_tp_size, moe_tp_size))


@pytest.mark.full
@pytest.mark.parametrize(
    "world_size,attn_tp_size,moe_tp_size",
    [
        split
        for split in [(3, 3, 3), (3, 1, 3), (6, 6, 3), (6, 3, 3), (6, 1, 3), (6, 3, 6), *splits(8)]
        if max(split[1:]) % min(split[1:]) == 0 and NUM_EXPERTS % (split[0] // split[2]) == 0
    ],
)
def test_any_wide_split_equals_one_rank(ranks, world_size, attn_tp_size, moe_tp_size):
    check(ranks(world_size), cases_of(world_size, attn_tp_size, moe_tp_size))


@pytest.mark.parametrize("attn_tp_size,moe_tp_size", [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
def test_padding_and_warm_up_do_not_count(ranks, attn_tp_size, moe_tp_size):
    dp_size = 4 // attn_tp_size
    case = MoECase(
        attn_tp_size,
        moe_tp_size,
        num_tokens=(5, 3, 1, 4)[:dp_size],
        num_padding=(2, 3, 0, 1)[:dp_size],
        is_prefill=False,
    )
    check(ranks(4), [case])
    warm_up = MoECase(attn_tp_size, moe_tp_size, (2,) * dp_size, is_prefill=True, is_warm_up=True)
    for ((_, counts, _),) in ranks(4).run(run_cases, [warm_up]):
        assert not any(counts)


@pytest.mark.parametrize("attn_tp_size,moe_tp_size", [(1, 1), (2, 1), (2, 2), (4, 2), (1, 4)])
@pytest.mark.parametrize("is_prefill", [True, False])
def test_forced_balance_loads_all_experts_equally(ranks, attn_tp_size, moe_tp_size, is_prefill):
    """All tokens would go to two experts; a multiple of E pairs on each rank is divided evenly."""
    dp_size = 4 // attn_tp_size
    num_tokens = 4 * NUM_EXPERTS // TOP_K
    case = MoECase(
        attn_tp_size, moe_tp_size, (num_tokens,) * dp_size, is_prefill, "first", force_eplb=True
    )
    results = [result for (result,) in ranks(4).run(run_cases, [case])]
    total = [sum(counts) for counts in zip(*(result[1] for result in results), strict=True)]
    assert total == [dp_size * num_tokens * TOP_K // NUM_EXPERTS] * NUM_EXPERTS
