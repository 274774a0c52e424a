"""Bytes that a plan moves, and how many descriptors it takes."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from inferkit.core.cache_spec import CacheKind, CacheSpec
from inferkit.core.transfer_messages import TargetMemory, TensorAddress
from inferkit.kv_transfer.layout import kv_head_layout
from inferkit.kv_transfer.rank_mapping import HeadRun, head_runs
from inferkit.kv_transfer.transfer_plan import (
    Ints,
    LinkPlan,
    TransferPlanError,
    block_range,
    cache_tensors,
    plan_for,
)
from tests.kv_transfer.ranks_alone import handshake

BLOCK_SIZE = 4
NUM_BLOCKS = 16
KEY = "full_attention"


def make_specs(num_layers: int, num_heads: int, **changed: Any) -> list[CacheSpec]:
    values: dict[str, Any] = {
        "kind": CacheKind.FULL,
        "manager_key": KEY,
        "num_heads": num_heads,
        "dims": (6, 2),
        "dtype": "float16",
        "block_size": BLOCK_SIZE,
    }
    return [CacheSpec(layer_idx=idx, **(values | changed)) for idx in range(num_layers)]


def addresses(specs: Sequence[CacheSpec], num_blocks: int = NUM_BLOCKS) -> list[TensorAddress]:
    """As PagedCache.allocate lays them out, one region per layer."""
    found = []
    for spec in specs:
        offset = 0
        for idx, dim in enumerate(spec.dims):
            found.append(TensorAddress(spec.layer_idx, idx, spec.layer_idx, offset))
            offset += num_blocks * spec.block_size * spec.num_heads * dim * 2
    return found


class RankMemory:
    """Caches of one rank; values say (layer, tensor, head, block content, token, dim)."""

    def __init__(self, specs: Sequence[CacheSpec]) -> None:
        self.specs = specs
        self.regions = [np.zeros(NUM_BLOCKS * s.bytes_per_block, np.uint8) for s in specs]
        self.tensors = cache_tensors(specs, addresses(specs), {KEY: NUM_BLOCKS})

    def view(self, layer: int, idx: int) -> np.ndarray[Any, Any]:
        tensor = next(t for t in self.tensors if (t.layer_idx, t.tensor_idx) == (layer, idx))
        spec = self.specs[layer]
        end = tensor.offset + NUM_BLOCKS * tensor.block_bytes
        shape = (NUM_BLOCKS, BLOCK_SIZE, spec.num_heads, spec.dims[idx])
        return self.regions[layer][tensor.offset : end].view(np.float16).reshape(shape)


def copy(runs: Ints, source: RankMemory, target: RankMemory, written: list[Any]) -> None:
    for src_region, src, dst_region, dst, size in runs.tolist():
        target.regions[dst_region][dst : dst + size] = source.regions[src_region][src : src + size]
        written[dst_region][dst : dst + size] += 1


def expand(rows: Ints) -> Ints:
    """[m, 5] plain runs of strided ones, piece by piece."""
    return np.array(
        [
            [row[0], row[1] + i * row[6], row[2], row[3] + i * row[7], row[4]]
            for row in rows.tolist()
            for i in range(row[5])
        ],
        np.int64,
    ).reshape(-1, 5)


def content(layer: int, idx: int, head: int, block: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng([layer, idx, head, block])
    return rng.integers(1, 1000, (BLOCK_SIZE, (6, 2)[idx])).astype(np.float16)


@pytest.mark.parametrize(
    ("prefill", "decode", "num_kv_heads"),
    [
        *itertools.product([1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4]),
        *itertools.product([1, 3, 4, 6], [2, 3, 5], [3, 9]),
    ],
)
def test_bytes_arrive_for_every_pair_of_tp_sizes(
    prefill: int, decode: int, num_kv_heads: int
) -> None:
    source_blocks, target_blocks = [7, 8, 2, 5], [3, 4, 5, 11]
    heads = {size: kv_head_layout(num_kv_heads, size) for size in (prefill, decode)}
    specs = {size: make_specs(2, heads[size].num_local_kv_heads) for size in heads}
    sources = [RankMemory(specs[prefill]) for _ in range(prefill)]
    targets = [RankMemory(specs[decode]) for _ in range(decode)]
    for rank, memory in enumerate(sources):
        for layer, idx in itertools.product(range(2), range(2)):
            memory.view(layer, idx)[:] = -1  # what padding holds must not travel
            for position, head in enumerate(heads[prefill].kv_heads(rank)):
                for order, block in enumerate(source_blocks):
                    if head is not None:
                        cells = memory.view(layer, idx)[block, :, position]
                        cells[:] = content(layer, idx, head, order)
    written = [[np.zeros_like(region) for region in memory.regions] for memory in targets]
    for (prefill_rank, decode_rank), runs in head_runs(num_kv_heads, prefill, decode).items():
        plan = LinkPlan(
            sources=sources[prefill_rank].tensors,
            targets=targets[decode_rank].tensors,
            head_runs={0: runs, 1: runs},
        )
        rows = plan.descriptors(
            {KEY: source_blocks}, {KEY: target_blocks}, first_token=0, end_token=14, is_last=True
        )
        assert len(rows) <= len(source_blocks) * 4 * len(runs)
        copy(expand(rows), sources[prefill_rank], targets[decode_rank], written[decode_rank])
    for rank, memory in enumerate(targets):
        assert all(region.max(initial=0) <= 1 for region in written[rank]), "a byte came twice"
        for layer, idx in itertools.product(range(2), range(2)):
            expected = np.zeros_like(memory.view(layer, idx))
            for position, head in enumerate(heads[decode].kv_heads(rank)):
                for order, block in enumerate(target_blocks):
                    if head is not None:
                        expected[block, :, position] = content(layer, idx, head, order)
            np.testing.assert_array_equal(memory.view(layer, idx), expected)


def plan_of(
    num_source_heads: int, num_target_heads: int, runs: list[HeadRun], num_layers: int = 1
) -> LinkPlan:
    sources, targets = (make_specs(num_layers, n) for n in (num_source_heads, num_target_heads))
    blocks = {KEY: 4096}
    return LinkPlan(
        sources=cache_tensors(sources, addresses(sources, 4096), blocks),
        targets=cache_tensors(targets, addresses(targets, 4096), blocks),
        head_runs=dict.fromkeys(range(num_layers), runs),
    )


def whole(plan: LinkPlan, source: Sequence[int], target: Sequence[int], num_tokens: int) -> Ints:
    blocks: tuple[Mapping[str, Sequence[int]], ...] = ({KEY: source}, {KEY: target})
    return plan.descriptors(*blocks, first_token=0, end_token=num_tokens, is_last=True)


def test_an_equal_layout_is_one_descriptor_per_tensor_and_run_of_blocks() -> None:
    plan = plan_of(1, 1, [HeadRun(0, 0, 1)], num_layers=61)
    rows = whole(plan, range(1, 2049), range(100, 2148), num_tokens=8192)
    assert len(rows) == 122
    assert (rows[:, 5] == 1).all()
    rows = whole(plan, [1, 2, 9, 10], [5, 6, 7, 8], num_tokens=16)
    assert len(rows) == 2 * 122


def test_a_range_of_heads_is_one_descriptor_per_tensor_and_run_of_blocks_too() -> None:
    plan = plan_of(1, 4, [HeadRun(0, 2, 1)], num_layers=3)
    rows = whole(plan, [1, 2, 9], [5, 6, 8], num_tokens=12)
    assert len(rows) == 3 * 2 * 2
    assert rows[0].tolist() == [0, 48, 0, 5 * 192 + 24, 12, 8, 12, 48]
    assert len(expand(rows)) == 3 * 2 * 12


def test_a_link_that_moves_no_head_has_no_descriptor() -> None:
    assert whole(plan_of(1, 1, []), [1], [1], num_tokens=4).shape == (0, 8)


@pytest.mark.parametrize(
    ("first", "end", "is_last", "expected"),
    [
        (0, 3, False, (0, 0)),
        (0, 4, False, (0, 1)),
        (3, 9, False, (0, 2)),
        (9, 10, True, (2, 3)),
        (8, 8, True, (2, 2)),
        (9, 9, True, (2, 3)),
    ],
)
def test_only_full_blocks_travel_before_the_last_chunk(
    first: int, end: int, is_last: bool, expected: tuple[int, int]
) -> None:
    assert block_range(first, end, 4, is_last=is_last) == expected


def test_every_block_travels_once_however_a_prompt_is_cut() -> None:
    for size in (1, 3, 4, 5, 8, 29):
        ends = [*range(size, 29, size), 29]
        sent: list[int] = []
        for idx, end in enumerate(ends):
            first = ends[idx - 1] if idx else 0
            blocks = block_range(first, end, 4, is_last=end == 29)
            sent += range(*blocks)
        assert sent == list(range(8)), size


def test_blocks_before_a_window_are_left_out() -> None:
    plan = plan_of(1, 1, [HeadRun(0, 0, 1)])
    rows = whole(plan, [0, 7, 8, 9], [0, 0, 3, 4, 99], num_tokens=16)
    assert rows[:, 1].tolist() == [8 * 48, NUM_TENSOR_BYTES + 8 * 16]
    assert rows[:, 4].tolist() == [2 * 48, 2 * 16]


NUM_TENSOR_BYTES = 4096 * 48


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([1, 0, 3], [4, 5, 6], "decode wants block 1 of the request, which prefill holds no more"),
        ([1, 2], [4, 5, 6], "the prefill side has 2 blocks of the request, 3 are to be sent"),
        ([1, 2, 3], [4], "the decode side has 1 blocks of the request, 3 are to be sent"),
        ([1, 2, 3], [4, 5, 4096], "the decode side names block 4096; its blocks are 0..4095"),
        ([1, 2, -3], [4, 5, 6], "the prefill side names block"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(
    source: list[int], target: list[int], message: str
) -> None:
    with pytest.raises(TransferPlanError, match=message):
        whole(plan_of(1, 1, [HeadRun(0, 0, 1)]), source, target, num_tokens=12)


def test_a_plan_follows_from_a_handshake() -> None:
    ours, theirs = make_specs(2, 2), make_specs(3, 1)
    memory = TargetMemory(
        engine={}, attn_tp_size=4, tensors=tuple(addresses(theirs)), num_blocks={KEY: NUM_BLOCKS}
    )
    plan = plan_for(
        handshake(decode_rank=4 + 3, memory=memory),
        specs=ours,
        num_kv_heads={0: 4, 1: 4},
        sources=cache_tensors(ours, addresses(ours), {KEY: NUM_BLOCKS}),
        tp_size=2,
        tp_rank=1,
    )
    rows = whole(plan, [1], [2], num_tokens=4)
    assert rows[0].tolist() == [0, 96 + 12, 0, 2 * 48, 12, 4, 24, 12]
    assert sorted(set(rows[:, 2].tolist())) == [0, 1]  # the third layer is none of prefill's


def test_tensors_that_differ_are_refused_with_both_values() -> None:
    ours, theirs = make_specs(1, 1), make_specs(1, 1, dims=(8, 2))
    with pytest.raises(TransferPlanError, match="head_bytes is 12 on the prefill.*16 on the decod"):
        LinkPlan(
            sources=cache_tensors(ours, addresses(ours), {KEY: 4}),
            targets=cache_tensors(theirs, addresses(theirs), {KEY: 4}),
            head_runs={},
        )


def test_layers_are_matched_by_index_and_tensors_that_one_side_lacks_stay() -> None:
    ours, theirs = make_specs(1, 1), make_specs(2, 1)
    plan = LinkPlan(
        sources=cache_tensors(ours, addresses(ours), {KEY: 16}),
        targets=cache_tensors(theirs, addresses(theirs)[::-1], {KEY: 16}),
        head_runs=dict.fromkeys(range(2), [HeadRun(0, 0, 1)]),
    )
    rows = whole(plan, [1], [2], num_tokens=4)
    assert rows[:, 2].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("address", "num_blocks", "message"),
    [
        (TensorAddress(5, 0, 0, 0), {KEY: 4}, "names no cache tensor"),
        (TensorAddress(0, 2, 0, 0), {KEY: 4}, "names no cache tensor"),
        (TensorAddress(0, 0, 0, 0), {"x": 4}, "no number of blocks is given for 'full_attention'"),
    ],
)
def test_addresses_of_nothing_are_refused(
    address: TensorAddress, num_blocks: dict[str, int], message: str
) -> None:
    with pytest.raises(TransferPlanError, match=message):
        cache_tensors(make_specs(1, 1), [address], num_blocks)
