from typing import Any

from inferkit.config.cluster_roles import keys_to_be_equal
from inferkit.inspect.diff.hand_off import hand_off
from inferkit.inspect.snapshot import Snapshot
from tests.inspect.diff.snapshots import snapshot

LEAVES: dict[str, Any] = {
    **dict.fromkeys(keys_to_be_equal(with_random_weights=True), 1),
    "model.arch": {},
    "disagg.transfer.params": {},
    "model.with_ckpt": True,
    "scheduler.batch_size": 1,
}


def side(role: str, **leaves: Any) -> Snapshot:
    return snapshot(role=role, leaves=LEAVES | leaves)


def test_only_prefill_and_decode_have_a_hand_off() -> None:
    assert hand_off(side("prefill"), side("prefill")) is None
    assert hand_off(side("serve"), side("decode")) is None
    assert hand_off(snapshot(), snapshot()) is None


def test_equal_where_they_must_be() -> None:
    found = hand_off(side("decode"), side("prefill", **{"scheduler.batch_size": 2}))

    assert found is not None and found.is_possible
    assert found.equal == tuple(keys_to_be_equal(with_random_weights=False))


def test_everything_that_prevents_it_is_found() -> None:
    found = hand_off(
        side("prefill", **{"kv_cache.block_size": 1, "model.arch.a": 1, "model.arch.b": 1}),
        side("decode", **{"kv_cache.block_size": 2, "model.arch.b": 2}),
    )

    assert found is not None and not found.is_possible
    assert found.different == ("model.arch.a", "model.arch.b", "kv_cache.block_size")
    assert "model.arch" not in found.equal
    assert "model.dtype" in found.equal


def test_a_seed_counts_where_weights_are_drawn_from_it() -> None:
    other = {"data.seed": 2}
    loaded = hand_off(side("prefill"), side("decode", **other))
    random = {"model.with_ckpt": False}
    drawn = hand_off(side("prefill", **random), side("decode", **random, **other))

    assert loaded is not None and loaded.is_possible
    assert drawn is not None and drawn.different == ("data.seed",)
