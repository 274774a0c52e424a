"""Which prefill rank sends which KV heads to which decode rank, for any two TP sizes.

Every real KV head reaches every decode rank that has it from exactly one prefill rank: where
several prefill ranks hold a head (replicas, latents) they share its receivers, and padded heads
stay where they are. A decode rank without a real head still has one link, which brings its slot;
a prefill rank without a receiver is told by one decode rank that it sends nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from inferkit.core.transfer_messages import InstanceLayout
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.layout import kv_head_layout


class HeadRun(NamedTuple):
    """Heads that are adjacent on both ranks; positions among the heads of a rank."""

    source: int
    target: int
    num_heads: int


class LinkTarget(NamedTuple):
    """A prefill rank that a decode rank deals with in a transfer."""

    prefill_rank: int
    required_dst_info_num: int
    """Handshakes that rank waits for; 0 = it sends nothing and is only told so."""


Pair = tuple[int, int]
"""(prefill TP rank, decode TP rank)."""


def head_runs(
    num_kv_heads: int, prefill_tp_size: int, decode_tp_size: int
) -> dict[Pair, list[HeadRun]]:
    """Who sends which of a layer's heads to whom; pairs that move nothing are absent."""
    holders = _holders(num_kv_heads, prefill_tp_size)
    receivers = _holders(num_kv_heads, decode_tp_size)
    found: dict[Pair, list[HeadRun]] = {}
    for head in range(num_kv_heads):
        for idx, (decode_rank, target) in enumerate(receivers[head]):
            # The replicas of a head divide its receivers into runs of equal length.
            sender = holders[head][idx * len(holders[head]) // len(receivers[head])]
            prefill_rank, source = sender
            runs = found.setdefault((prefill_rank, decode_rank), [])
            last = runs[-1] if runs else None
            if last and (last.source, last.target) == (
                source - last.num_heads,
                target - last.num_heads,
            ):
                runs[-1] = last._replace(num_heads=last.num_heads + 1)
            else:
                runs.append(HeadRun(source, target, 1))
    return found


def _holders(num_kv_heads: int, tp_size: int) -> list[list[tuple[int, int]]]:
    """Head -> (rank, position on the rank) of each of its replicas."""
    heads = kv_head_layout(num_kv_heads, tp_size)
    holders: list[list[tuple[int, int]]] = [[] for _ in range(num_kv_heads)]
    for rank in range(tp_size):
        for position, head in enumerate(heads.kv_heads(rank)):
            if head is not None:
                holders[head].append((rank, position))
    return holders


@dataclass(frozen=True, kw_only=True)
class TargetRankMapping:
    """Links between the TP ranks of one set of prefill ranks and one set of decode ranks."""

    prefill_tp_size: int
    decode_tp_size: int
    num_kv_heads: frozenset[int]
    """Of all layers; a model may mix latent and grouped attention."""

    @classmethod
    def of(cls, prefill: InstanceLayout, decode: InstanceLayout) -> "TargetRankMapping":
        layers = list(decode.layers)
        if prefill.mtp_layers:
            layers += decode.mtp_layers
        return cls(
            prefill_tp_size=prefill.attn_tp_size,
            decode_tp_size=decode.attn_tp_size,
            num_kv_heads=frozenset(layer.num_kv_heads for layer in layers),
        )

    @cached_property
    def runs(self) -> Mapping[int, Mapping[Pair, list[HeadRun]]]:
        """Number of KV heads of a layer -> its head runs per pair of ranks."""
        return {
            count: head_runs(count, self.prefill_tp_size, self.decode_tp_size)
            for count in sorted(self.num_kv_heads)
        }

    @cached_property
    def pairs(self) -> frozenset[Pair]:
        """All links."""
        links = {pair for runs in self.runs.values() for pair in runs}
        served = {decode_rank for _, decode_rank in links}
        for rank in set(range(self.decode_tp_size)) - served:
            links.add((rank * self.prefill_tp_size // self.decode_tp_size, rank))
        return frozenset(links)

    def targets(self, decode_rank: int) -> list[int]:
        """Prefill TP ranks that send to this decode TP rank."""
        return sorted(prefill for prefill, decode in self.pairs if decode == decode_rank)

    def required_dst_info_num(self, prefill_rank: int) -> int:
        """Handshakes that a prefill TP rank waits for; 0 = it has nobody to send to."""
        return sum(prefill == prefill_rank for prefill, _ in self.pairs)

    def dummies(self, decode_rank: int) -> list[int]:
        """Prefill TP ranks without a link that this decode TP rank has to tell so."""
        return [
            prefill
            for prefill in range(self.prefill_tp_size)
            if not self.required_dst_info_num(prefill)
            and prefill * self.decode_tp_size // self.prefill_tp_size == decode_rank
        ]

    def link_targets(self, decode_rank: int, prefill_ranks: Sequence[int]) -> list[LinkTarget]:
        """Whom a decode TP rank sends Handshakes; `prefill_ranks` are those that hold the KV, in
        the order of their TP ranks."""
        links = [*self.targets(decode_rank), *self.dummies(decode_rank)]
        return [LinkTarget(prefill_ranks[tp], self.required_dst_info_num(tp)) for tp in links]


def prefill_dp_rank(layout: InstanceLayout, room: int) -> int:
    """The set of prefill ranks that computes a room; both sides compute it, nobody is asked."""
    return room % layout.attn_dp_size


def prefill_ranks(layout: InstanceLayout, room: int) -> list[int]:
    """Ranks that hold the KV of a room, by TP rank. With context parallelism that is the one rank
    that owns the prompt, however many compute it."""
    first = prefill_dp_rank(layout, room) * layout.attn_tp_size
    return list(range(first, first + layout.attn_tp_size))


@dataclass(frozen=True, kw_only=True)
class PrefillServerInfo:
    """What a bootstrap server knows of its prefill instance."""

    peer: Peer
    layout: InstanceLayout
    addresses: Mapping[int, str]
    """Rank -> `tcp://host:port` of its control socket."""

    @property
    def world_size(self) -> int:
        return self.layout.attn_tp_size * self.layout.attn_dp_size

    @property
    def is_complete(self) -> bool:
        """Every rank has registered; distinct ranks count, not registrations."""
        return set(self.addresses) == set(range(self.world_size))

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(dp, cp, tp) of a rank, as the keys of a route name it."""
        if self.layout.cp_size > 1:
            return 0, rank, 0
        dp_rank, tp_rank = divmod(rank, self.layout.attn_tp_size)
        return dp_rank, 0, tp_rank
