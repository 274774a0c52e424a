"""What a decode rank knows of prefill instances."""

from typing import Any

import msgspec

from inferkit.core.transfer_messages import InstanceLayout, LayerLayout
from inferkit.kv_transfer.directory import PrefillDirectory
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.rank_mapping import LinkTarget, PrefillServerInfo

OLD, NEW = Peer("p", 1), Peer("p", 2)


def layout(tp: int = 1, dp: int = 1, **changed: Any) -> InstanceLayout:
    layer = LayerLayout(
        layer_idx=0,
        kind="full_attention",
        manager_key="full_attention",
        num_kv_heads=2,
        dims=(8, 8),
        dtype="float32",
        block_size=4,
        layout="BnBsND",
    )
    values: dict[str, Any] = {
        "model": "m",
        "model_fingerprint": "f",
        "transfer_engine": "e",
        "attn_tp_size": tp,
        "attn_dp_size": dp,
        "layers": (layer,),
    }
    return InstanceLayout(**(values | changed))


def info(peer: Peer, prefill: InstanceLayout, num_ranks: int | None = None) -> PrefillServerInfo:
    world_size = prefill.attn_tp_size * prefill.attn_dp_size
    ranks = range(world_size if num_ranks is None else num_ranks)
    return PrefillServerInfo(
        peer=peer, layout=prefill, addresses={rank: f"tcp://h:{rank}" for rank in ranks}
    )


def directory(tp_rank: int = 0, **changed: Any) -> PrefillDirectory:
    return PrefillDirectory(layout=layout(**changed), tp_rank=tp_rank, decode_id="d")


def test_a_route_is_known_when_every_rank_has_registered() -> None:
    known = directory()
    assert known.routes(OLD, 0) is None
    known.learn(info(OLD, layout(2, 2), num_ranks=3))
    assert known.routes(OLD, 0) is None
    known.learn(info(OLD, layout(2, 2)))
    assert known.routes(OLD, 0) == [LinkTarget(0, 1), LinkTarget(1, 1)]
    assert known.routes(OLD, 1) == [LinkTarget(2, 1), LinkTarget(3, 1)]
    assert known.address(OLD, 3) == "tcp://h:3"
    assert known.address(OLD, 4) is None


def test_a_new_life_replaces_the_old_one() -> None:
    known = directory()
    assert known.learn(info(OLD, layout())) == (None, [])
    assert known.learn(info(OLD, layout())) == (None, [])
    assert known.learn(info(NEW, layout())) == (OLD, [])
    assert known.routes(OLD, 0) is None and known.routes(NEW, 0) is not None
    assert known.address(OLD, 0) is None


def test_a_life_that_is_out_of_reach_gets_no_new_transfer() -> None:
    known = directory()
    known.learn(info(OLD, layout()))
    known.lose(OLD)
    assert known.routes(OLD, 0) is None
    known.find(OLD)
    assert known.routes(OLD, 0) is not None


def test_an_instance_that_does_not_fit_is_refused_and_the_process_lives() -> None:
    known = directory()
    known.learn(info(OLD, layout(model="n")))
    assert "model: prefill has 'n', decode has 'm'" in known.refusal(OLD)
    assert known.routes(OLD, 0) is None
    known.learn(info(NEW, layout()))
    assert known.refusal(OLD) == "" == known.refusal(NEW)
    assert known.routes(NEW, 0) is not None


def test_a_warning_comes_once_per_life() -> None:
    (layer,) = layout().layers
    known = directory(mtp_layers=(msgspec.structs.replace(layer, layer_idx=1),))
    assert len(known.learn(info(OLD, layout()))[1]) == 1
    assert known.learn(info(OLD, layout()))[1] == []
