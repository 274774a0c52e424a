"""What makes one life of an instance: its names, and where its workers find their parent."""

import secrets
from dataclasses import dataclass
from typing import Any

from inferkit.core.messages import MAX_ROOM

NUM_EPOCH_BITS = 64


@dataclass(frozen=True, kw_only=True)
class Instance:
    """Drawn anew whenever the instance starts; compared for equality only."""

    instance_id: str
    epoch: int

    @classmethod
    def draw(cls, role: str) -> "Instance":
        return cls(
            instance_id=f"{role}-{secrets.token_hex(4)}", epoch=secrets.randbits(NUM_EPOCH_BITS)
        )

    @property
    def header(self) -> dict[str, Any]:
        """The common part of a message between the parent and the workers of this instance."""
        return {
            "instance_id": self.instance_id,
            "epoch": self.epoch,
            "peer_epoch": self.epoch,
        }


@dataclass(frozen=True, kw_only=True)
class ParentAddress:
    """Where the parent listens for its workers; goes to them over their own pipe."""

    instance: Instance
    request_url: str
    """A worker connects a DEALER here and gets requests."""
    output_url: str
    """A worker connects a PUSH here."""
    bootstrap_url: str = ""
    """Of a prefill instance: its ranks register there."""


def socket_identity(instance: Instance, dp_rank: int) -> bytes:
    """By what the parent addresses a DP rank."""
    return f"{instance.epoch:x}/{dp_rank}".encode()


def draw_room() -> int:
    return 1 + secrets.randbelow(MAX_ROOM)


class Attempts:
    """64-bit numbers of which none comes twice, not in another process either: a random start
    and a counter."""

    def __init__(self) -> None:
        self._last = secrets.randbits(64)

    def next(self) -> int:
        self._last = (self._last + 1) % 2**64
        return self._last
