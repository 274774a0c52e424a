"""Who sends what to whom, for any two TP sizes."""

import itertools
from typing import Any

import msgspec
import pytest

from inferkit.core.transfer_messages import InstanceLayout, LayerLayout
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.layout import kv_head_layout
from inferkit.kv_transfer.rank_mapping import (
    HeadRun,
    LinkTarget,
    PrefillServerInfo,
    TargetRankMapping,
    head_runs,
    prefill_ranks,
)

SIZES = [1, 2, 3, 4, 6, 8]


def mapping(prefill: int, decode: int, *num_kv_heads: int) -> TargetRankMapping:
    return TargetRankMapping(
        prefill_tp_size=prefill,
        decode_tp_size=decode,
        num_kv_heads=frozenset(num_kv_heads),
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "targets", "required"),
    [
        (4, 4, [[0], [1], [2], [3]], [1, 1, 1, 1]),
        (2, 4, [[0], [0], [1], [1]], [2, 2]),
        (4, 2, [[0, 1], [2, 3]], [1, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize("num_kv_heads", [4, 8])
def test_vectors_of_the_reference(
    prefill: int, decode: int, targets: list[list[int]], required: list[int], num_kv_heads: int
) -> None:
    links = mapping(prefill, decode, num_kv_heads)
    assert [links.targets(rank) for rank in range(decode)] == targets
    assert [links.required_dst_info_num(rank) for rank in range(prefill)] == required
    assert [links.dummies(rank) for rank in range(decode)] == [[]] * decode


@pytest.mark.parametrize(
    ("prefill", "decode", "targets", "dummies"),
    [
        (4, 4, [[0], [1], [2], [3]], [[], [], [], []]),
        (2, 4, [[0], [0], [1], [1]], [[], [], [], []]),
        (4, 2, [[0], [2]], [[1], [3]]),
    ],
)
def test_latents_come_from_one_rank_and_the_others_are_told(
    prefill: int, decode: int, targets: list[list[int]], dummies: list[list[int]]
) -> None:
    links = mapping(prefill, decode, 1)
    assert [links.targets(rank) for rank in range(decode)] == targets
    assert [links.dummies(rank) for rank in range(decode)] == dummies
    assert links.required_dst_info_num(1) == (0 if prefill > decode else decode // prefill)


@pytest.mark.parametrize(
    ("prefill", "decode", "num_kv_heads"), list(itertools.product(SIZES, SIZES, [1, 2, 3, 4, 8, 9]))
)
def test_every_real_head_arrives_once_at_every_rank_that_has_it(
    prefill: int, decode: int, num_kv_heads: int
) -> None:
    sources = [kv_head_layout(num_kv_heads, prefill).kv_heads(rank) for rank in range(prefill)]
    targets = [kv_head_layout(num_kv_heads, decode).kv_heads(rank) for rank in range(decode)]
    arrived: list[list[int | None]] = [[None] * len(heads) for heads in targets]
    runs = head_runs(num_kv_heads, prefill, decode)
    for (prefill_rank, decode_rank), pair_runs in runs.items():
        for run in pair_runs:
            for idx in range(run.num_heads):
                head = sources[prefill_rank][run.source + idx]
                assert head is not None, "padding travels"
                assert arrived[decode_rank][run.target + idx] is None, "a head travels twice"
                arrived[decode_rank][run.target + idx] = head
    assert arrived == targets


@pytest.mark.parametrize(
    ("prefill", "decode", "num_kv_heads"), list(itertools.product(SIZES, SIZES, [1, 2, 3, 4, 9]))
)
def test_every_rank_is_reached(prefill: int, decode: int, num_kv_heads: int) -> None:
    links = mapping(prefill, decode, num_kv_heads)
    assert all(links.targets(rank) for rank in range(decode))
    told = [rank for decode_rank in range(decode) for rank in links.dummies(decode_rank)]
    senders = {prefill_rank for prefill_rank, _ in links.pairs}
    assert len(told) == len(set(told))
    assert set(told) | senders == set(range(prefill)) and not set(told) & senders
    total = sum(links.required_dst_info_num(rank) for rank in range(prefill))
    assert total == sum(len(links.targets(rank)) for rank in range(decode))


def test_neighbouring_heads_are_one_run() -> None:
    assert head_runs(8, 1, 1) == {(0, 0): [HeadRun(0, 0, 8)]}
    assert head_runs(8, 2, 1) == {(0, 0): [HeadRun(0, 0, 4)], (1, 0): [HeadRun(0, 4, 4)]}
    assert head_runs(8, 1, 2) == {(0, 0): [HeadRun(0, 0, 4)], (0, 1): [HeadRun(4, 0, 4)]}


def test_replicas_share_their_receivers() -> None:
    assert set(head_runs(1, 2, 4)) == {(0, 0), (0, 1), (1, 2), (1, 3)}
    assert set(head_runs(2, 8, 4)) == {(0, 0), (2, 1), (4, 2), (6, 3)}


def test_padding_stays_where_it_is() -> None:
    # 3 KV heads on 4 ranks are padded to 4: the last rank holds padding only.
    assert set(head_runs(3, 4, 4)) == {(0, 0), (1, 1), (2, 2)}
    links = mapping(4, 4, 3)
    assert links.targets(3) == [3]  # its slot still comes from somewhere


def layout(tp: int, dp: int, cp: int = 1) -> InstanceLayout:
    layer = LayerLayout(
        layer_idx=0,
        kind="full_attention",
        manager_key="full_attention",
        num_kv_heads=4,
        dims=(8, 8),
        dtype="float32",
        block_size=4,
        layout="BnBsND",
    )
    sizes: dict[str, Any] = {"attn_tp_size": tp, "attn_dp_size": dp, "cp_size": cp}
    return InstanceLayout(
        model="m", model_fingerprint="f", transfer_engine="e", layers=(layer,), **sizes
    )


def test_a_room_chooses_its_set_of_prefill_ranks() -> None:
    assert [prefill_ranks(layout(2, 3), room) for room in (3, 4, 5, 6)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [0, 1],
    ]
    assert prefill_ranks(layout(1, 4, cp=4), 2**63 - 1) == [3]


def test_link_targets_name_ranks_of_the_instance() -> None:
    links = TargetRankMapping.of(layout(4, 2), layout(2, 1))
    ranks = prefill_ranks(layout(4, 2), room=1)
    assert links.link_targets(1, ranks) == [LinkTarget(6, 1), LinkTarget(7, 1)]
    latent = mapping(4, 2, 1)
    assert latent.link_targets(0, ranks) == [LinkTarget(4, 1), LinkTarget(5, 0)]


def test_layers_that_only_decode_has_make_no_link() -> None:
    (main,) = layout(2, 1).layers
    latent = msgspec.structs.replace(main, layer_idx=1, num_kv_heads=1)
    decode = msgspec.structs.replace(layout(2, 1), mtp_layers=(latent,))
    assert TargetRankMapping.of(layout(2, 1), decode).num_kv_heads == {4}
    assert TargetRankMapping.of(decode, decode).num_kv_heads == {1, 4}


def test_an_instance_is_complete_when_all_distinct_ranks_are_there() -> None:
    peer = Peer("p", 1)
    addresses = {rank: f"tcp://10.0.0.1:{9000 + rank}" for rank in range(4)}
    info = PrefillServerInfo(peer=peer, layout=layout(2, 2), addresses=addresses)
    assert info.is_complete
    assert [info.coordinates(rank) for rank in range(4)] == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 0, 0),
        (1, 0, 1),
    ]
    del addresses[3]
    assert not info.is_complete
    context = PrefillServerInfo(peer=peer, layout=layout(1, 2, cp=2), addresses=addresses)
    assert context.coordinates(1) == (0, 1, 0)
