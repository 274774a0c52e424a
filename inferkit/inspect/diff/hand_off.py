"""Prefill against decode: what must be equal before one can hand KV over to the other."""

from collections.abc import Iterator
from dataclasses import dataclass

from inferkit.config.cluster_roles import DECODE, PREFILL, keys_to_be_equal
from inferkit.inspect.snapshot import Leaf, Snapshot


@dataclass(frozen=True, kw_only=True)
class HandOff:
    """The keys that two roles of one deployment must have in common."""

    equal: tuple[str, ...]
    """Nodes are named as a whole: `model.arch`."""
    different: tuple[str, ...]
    """Leaves; with one of these the two refuse each other."""

    @property
    def is_possible(self) -> bool:
        return not self.different


def hand_off(left: Snapshot, right: Snapshot) -> HandOff | None:
    """None where the two are not prefill and decode."""
    by_role = {left.role: left, right.role: right}
    if set(by_role) != {PREFILL, DECODE}:
        return None
    prefill, decode = by_role[PREFILL], by_role[DECODE]
    with_ckpt = prefill.leaves.get("model.with_ckpt")
    is_seeded = with_ckpt is not None and not with_ckpt.value
    equal: list[str] = []
    different: list[str] = []
    for key in keys_to_be_equal(with_random_weights=is_seeded):
        found = [
            leaf
            for leaf in dict.fromkeys([*_below(prefill, key), *_below(decode, key)])
            if _value(prefill.leaves.get(leaf)) != _value(decode.leaves.get(leaf))
        ]
        different += found
        equal += [] if found else [key]
    return HandOff(equal=tuple(equal), different=tuple(different))


def _below(snapshot: Snapshot, key: str) -> Iterator[str]:
    """`key`, or all leaves of the node of that name."""
    return (leaf for leaf in snapshot.leaves if leaf == key or leaf.startswith(f"{key}."))


def _value(leaf: Leaf | None) -> object:
    """An empty dictionary says no more than none."""
    return None if leaf is None or leaf.value == {} else leaf.value
