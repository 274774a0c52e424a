"""What a decode rank knows of prefill instances: which lives, how to reach them, whether they fit.

It is filled from bootstrap servers; nothing is ever taken from a client's request.
"""

from collections.abc import Sequence

from inferkit.core.transfer_messages import InstanceLayout
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.layout import LayoutError, check_compatible
from inferkit.kv_transfer.rank_mapping import (
    LinkTarget,
    PrefillServerInfo,
    TargetRankMapping,
    prefill_ranks,
)


class PrefillDirectory:
    """Args:
    layout: of this decode instance.
    tp_rank: of this decode rank.
    """

    def __init__(self, *, layout: InstanceLayout, tp_rank: int, decode_id: str) -> None:
        self.layout = layout
        self.tp_rank = tp_rank
        self.decode_id = decode_id
        self._infos: dict[str, PrefillServerInfo] = {}
        self._mappings: dict[Peer, TargetRankMapping] = {}
        self._refusals: dict[Peer, str] = {}
        self._unreachable: set[Peer] = set()

    def learn(self, info: PrefillServerInfo) -> tuple[Peer | None, list[str]]:
        """Take what a bootstrap server says now.

        Returns the life that this one has replaced, if any (its records are told
        `on_peer_gone`), and warnings about the pair, once per life.
        """
        known = self._infos.get(info.peer.instance_id)
        self._infos[info.peer.instance_id] = info
        if known is not None and known.peer == info.peer:
            return None, []
        warnings: list[str] = []
        try:
            warnings = check_compatible(
                info.layout,
                self.layout,
                prefill_id=info.peer.instance_id,
                decode_id=self.decode_id,
            )
            self._mappings[info.peer] = TargetRankMapping.of(info.layout, self.layout)
        except LayoutError as error:
            self._refusals[info.peer] = str(error)
        if known is None:
            return None, warnings
        self._mappings.pop(known.peer, None)
        self._refusals.pop(known.peer, None)
        self._unreachable.discard(known.peer)
        return known.peer, warnings

    def lose(self, peer: Peer) -> None:
        """The heartbeat of a life has stopped: no new transfer begins with it."""
        self._unreachable.add(peer)

    def find(self, peer: Peer) -> None:
        self._unreachable.discard(peer)

    def refusal(self, peer: Peer) -> str:
        """Why this pair cannot work together, with both values; "" = it can, or is not known."""
        return self._refusals.get(peer, "")

    def routes(self, peer: Peer, room: int) -> Sequence[LinkTarget] | None:
        """The prefill ranks that this rank deals with; None while they cannot be reached."""
        info = self._infos.get(peer.instance_id)
        mapping = self._mappings.get(peer)
        is_there = info is not None and info.peer == peer and info.is_complete
        if info is None or mapping is None or not is_there or peer in self._unreachable:
            return None
        return mapping.link_targets(self.tp_rank, prefill_ranks(info.layout, room))

    def address(self, peer: Peer, rank: int) -> str | None:
        """`tcp://host:port` of a prefill rank; None when its life is over or not known."""
        info = self._infos.get(peer.instance_id)
        return None if info is None or info.peer != peer else info.addresses.get(rank)
