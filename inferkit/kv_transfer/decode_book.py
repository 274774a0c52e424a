"""What a prefill rank remembers of one decode rank: its floor, live links, stray Handshakes and
tombstones.

A tombstone refuses the Handshake of a transfer that was aborted before it came, however late it
comes; only the decode rank's floor takes it away, never time: a time-out shorter than the longest
delay of a message would let a write land in memory that is somebody else's by then.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inferkit.core.transfer_messages import Handshake, Status
from inferkit.kv_transfer.identity import Peer, TransferKey

if TYPE_CHECKING:
    from inferkit.kv_transfer.prefill_record import PrefillLink

MAX_LIVES = 8
"""Lives of one instance that are remembered; all messages of older ones are dropped for good."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A transfer that is over here. `is_lost`: a write of it may still land, so its drain is never
    acknowledged and decode has to fence."""

    key: TransferKey
    last_status: Status | None = None
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Stashed:
    """A Handshake whose request has not come; holds nothing."""

    handshake: Handshake
    until: float


@dataclass(eq=False, slots=True)
class DecodeBook:
    """Of one decode rank in one epoch; everything is known by transfer id."""

    floor: int = 0
    live: dict[int, "PrefillLink"] = field(default_factory=dict)
    stash: dict[int, Stashed] = field(default_factory=dict)
    tombstones: dict[int, Tombstone] = field(default_factory=dict)

    def raise_floor(self, floor: int) -> list["PrefillLink"]:
        """Forget what is over at decode; returns the links that are still live here."""
        if floor <= self.floor:
            return []
        self.floor = floor
        for table in (self.stash, self.tombstones):
            for transfer_id in [known for known in table if known < floor]:
                del table[transfer_id]
        return [link for transfer_id, link in self.live.items() if transfer_id < floor]

    def bury(self, transfer_id: int, tombstone: Tombstone) -> None:
        """The transfer is over; below the floor nothing needs to be remembered."""
        self.live.pop(transfer_id, None)
        self.stash.pop(transfer_id, None)
        if transfer_id >= self.floor:
            self.tombstones[transfer_id] = tombstone

    def has_tombstone_of(self, key: TransferKey) -> bool:
        return any(tombstone.key == key for tombstone in self.tombstones.values())

    def take_stash_of(self, key: TransferKey) -> list[Handshake]:
        found = [s.handshake for s in self.stash.values() if TransferKey.of(s.handshake) == key]
        for handshake in found:
            del self.stash[handshake.transfer_id]
        return found

    def expire_stash(self, now: float) -> list[Handshake]:
        found = [stashed.handshake for stashed in self.stash.values() if now >= stashed.until]
        for handshake in found:
            del self.stash[handshake.transfer_id]
        return found


class DecodeBooks:
    """The books of all decode ranks that this prefill rank has heard of."""

    def __init__(self) -> None:
        self._lives: dict[str, dict[Peer, dict[int, DecodeBook]]] = {}
        self._retired: set[Peer] = set()

    def of(self, peer: Peer, rank: int) -> DecodeBook | None:
        """The book of a rank, made when it is new; None for a life that is retired.

        A retired peer that is alive after all gets no answers and fences: slow, but safe.
        """
        if peer in self._retired:
            return None
        lives = self._lives.setdefault(peer.instance_id, {})
        if peer not in lives and len(lives) >= MAX_LIVES:
            self._retire_one(lives)
        return lives.setdefault(peer, {}).setdefault(rank, DecodeBook())

    def of_peer(self, peer: Peer) -> dict[int, DecodeBook]:
        """Decode rank -> its book."""
        return self._lives.get(peer.instance_id, {}).get(peer, {})

    def all(self) -> list[DecodeBook]:
        return [
            book
            for lives in self._lives.values()
            for ranks in lives.values()
            for book in ranks.values()
        ]

    @property
    def num_tombstones(self) -> int:
        return sum(len(book.tombstones) for book in self.all())

    @property
    def num_stashed(self) -> int:
        return sum(len(book.stash) for book in self.all())

    def _retire_one(self, lives: dict[Peer, dict[int, DecodeBook]]) -> None:
        for peer, ranks in lives.items():
            if not any(book.live for book in ranks.values()):
                self._retired.add(peer)
                del lives[peer]
                return
