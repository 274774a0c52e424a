"""What a bootstrap server remembers, under a virtual clock (reference section 6.6)."""

from typing import Any

import msgspec
import pytest

from inferkit.kv_transfer.route import read_route
from inferkit.online import bootstrap_table
from inferkit.online.bootstrap_table import OtherLife
from inferkit.online.errors import BadRequest, Unavailable
from tests.kv_transfer.bootstrap import layer, layout, registration, table
from tests.kv_transfer.ranks_alone import Clock


def test_a_route_needs_every_distinct_rank() -> None:
    known, instance = table(), layout(tp=2, dp=2)
    with pytest.raises(Unavailable, match="no prefill rank has registered"):
        known.route()
    for rank in (0, 1, 1, 1, 3):
        known.register(registration(rank, layout=instance))
        assert not known.health().ready
    with pytest.raises(Unavailable, match="3 of 4 prefill ranks .* missing are ranks 2"):
        known.route()
    known.register(registration(2, layout=instance))
    assert known.health().ready
    route = known.route()
    assert list(route.ranks) == ["0,0,0", "0,0,1", "1,0,0", "1,0,1"]
    info = read_route(msgspec.json.encode(route))
    assert info.peer == ("p", 1)
    assert info.layout == instance
    assert info.addresses == {rank: f"tcp://127.0.0.1:{7000 + rank}" for rank in range(4)}


def test_a_route_says_what_the_reference_says() -> None:
    known = table()
    layers = (layer(0), layer(1, dims=(16,), block_size=8))
    known.register(registration(layout=layout(layers=layers, mtp_layers=(layer(2),))))
    said = msgspec.to_builtins(known.route())
    assert said["block_size"] == 4
    assert said["block_sizes"] == [4, 4, 8, 4, 4]
    assert said["kv_cache_dtype"] == "float32"
    assert said["max_prefill_tokens"] == 64
    assert (said["attn_tp_size"], said["attn_cp_size"], said["dp_size"]) == (1, 1, 1)
    assert said["ranks"] == {"0,0,0": {"rank": 0, "rank_ip": "127.0.0.1", "rank_port": 7000}}
    assert (said["instance_id"], said["epoch"]) == ("p", 1)


def test_ranks_of_a_context_parallel_instance_are_one_set() -> None:
    known, instance = table(), layout(dp=2, cp_size=2)
    for rank in range(2):
        known.register(registration(rank, layout=instance))
    route = known.route()
    assert list(route.ranks) == ["0,0,0", "0,1,0"]
    assert (route.attn_cp_size, route.dp_size) == (2, 1)
    assert known.query_dp_ranks([5]) == {5: 0}
    assert read_route(msgspec.json.encode(route)).addresses.keys() == {0, 1}


def test_a_rank_that_is_silent_for_three_intervals_is_forgotten() -> None:
    clock = Clock()
    known, instance = table(clock=clock), layout(tp=2)
    for rank in range(2):
        known.register(registration(rank, layout=instance))
    clock.now_s += 14.9
    known.register(registration(0, layout=instance))
    assert known.health().ready
    clock.now_s += 0.2
    assert not known.health().ready
    with pytest.raises(Unavailable, match="missing are ranks 1"):
        known.route()
    known.register(registration(1, layout=instance))
    assert known.health().ready


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"epoch": 2}, "epoch=2 of rank 0 .* 1;"),
        ({"peer_epoch": 3}, "peer_epoch=3 of rank 0 .* 1;"),
        ({"instance_id": "q"}, "instance_id='q' of rank 0 .* 'p';"),
    ],
)
def test_a_rank_of_another_life_is_refused_with_both_values(
    changed: dict[str, Any], match: str
) -> None:
    known = table()
    with pytest.raises(OtherLife, match=match) as caught:
        known.register(registration(**({"epoch": 1, "peer_epoch": 1} | changed)))
    assert caught.value.status == 409
    assert caught.value.param == next(iter(changed))
    assert not known.health().ready


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"protocol_version": 9}, "protocol_version"),
        ({"rank": 1}, "rank"),
        ({"rank_ip": "0.0.0.0"}, "rank_ip"),
        ({"rank_ip": "a;b"}, "rank_ip"),
        ({"rank_ip": ""}, "rank_ip"),
        ({"layout": layout(dp=2**60)}, "layout.attn_dp_size"),
        ({"layout": layout(tp=2, dp=2, cp_size=4)}, "layout.cp_size"),
        ({"layout": layout(layers=())}, "layout.layers"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_name(changed: dict[str, Any], field: str) -> None:
    known = table()
    with pytest.raises(BadRequest) as caught:
        known.register(registration(**changed))
    assert caught.value.param == field
    assert not known.health().ready


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"layout": layout(tp=2, model="n")}, "layout.model: rank 1 has 'n', rank 0 has 'm'"),
        (
            {"layout": layout(tp=2, layers=(layer(block_size=8),))},
            r"layout.layers\[0\].block_size: rank 1 has 8, rank 0 has 4",
        ),
        (
            {"layout": layout(tp=2, layers=(layer(), layer(1)))},
            "number of layout.layers: rank 1 has 2, rank 0 has 1",
        ),
        (
            {"layout": layout(tp=2), "max_prefill_tokens": 65},
            "max_prefill_tokens: rank 1 has 65, rank 0 has 64",
        ),
    ],
)
def test_ranks_that_disagree_are_refused_with_both_values(
    changed: dict[str, Any], match: str
) -> None:
    known = table()
    known.register(registration(0, layout=layout(tp=2)))
    with pytest.raises(BadRequest, match=match):
        known.register(registration(1, **changed))
    assert not known.health().ready


def test_the_last_word_of_a_rank_counts_also_about_its_layout() -> None:
    known = table()
    known.register(registration(0, layout=layout(tp=2)))
    known.register(registration(0, layout=layout(), rank_port=1234))
    assert known.route().ranks["0,0,0"].rank_port == 1234


def test_a_room_without_a_registration_is_computed() -> None:
    known = table()
    assert known.query_dp_ranks([7]) == {7: -1}
    for rank in range(3):
        known.register(registration(rank, layout=layout(dp=3)))
    assert known.query_dp_ranks([7, 8, 2**63 - 1]) == {7: 1, 8: 2, 2**63 - 1: (2**63 - 1) % 3}
    known.register_dp_rank(7, 2)
    assert known.query_dp_ranks([7]) == {7: 2}


def test_rooms_are_forgotten_in_time_and_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_table, "MAX_ROOMS", 2)
    clock = Clock()
    known = table(clock=clock, interval_s=10_000)
    for rank in range(2):
        known.register(registration(rank, layout=layout(dp=2)))
    for room in (2, 4, 2, 6):
        known.register_dp_rank(room, 1)
    assert known.query_dp_ranks([2, 4, 6]) == {2: 1, 4: 0, 6: 1}
    clock.now_s += bootstrap_table.ROOM_TTL_S
    assert known.query_dp_ranks([2, 6]) == {2: 0, 6: 0}


def test_rooms_and_dp_ranks_have_limits() -> None:
    known = table()
    with pytest.raises(Unavailable):
        known.register_dp_rank(1, 0)
    known.register(registration())
    for room in (0, -1, 2**63):
        with pytest.raises(BadRequest, match="allowed is 1 to"):
            known.register_dp_rank(room, 0)
        with pytest.raises(BadRequest, match="allowed is 1 to"):
            known.query_dp_ranks([room])
    for dp_rank in (-1, 1):
        with pytest.raises(BadRequest, match="allowed is 0 to 0"):
            known.register_dp_rank(1, dp_rank)
    with pytest.raises(BadRequest, match="at most 4096"):
        known.query_dp_ranks(range(1, 4098))
