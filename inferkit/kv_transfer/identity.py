"""Who a transfer is between, and what it is known by."""

from dataclasses import dataclass
from typing import NamedTuple

from inferkit.core.messages import Message

NONCE_BITS = 32


class Peer(NamedTuple):
    """One life of an instance. A process restarted at the same address is another peer."""

    instance_id: str
    epoch: int

    @classmethod
    def sender_of(cls, message: Message) -> "Peer":
        return cls(message.instance_id, message.epoch)


class TransferKey(NamedTuple):
    """One attempt of one request. A room alone never identifies anything."""

    room: int
    attempt: int

    @classmethod
    def of(cls, message: Message) -> "TransferKey":
        return cls(message.room, message.attempt)

    @property
    def router(self) -> int:
        """The router process that made this attempt; its attempts count up below its nonce."""
        return self.attempt >> NONCE_BITS


def is_rival(key: TransferKey, other: TransferKey) -> bool:
    """Whether two attempts are of different requests that use one room.

    Attempts of one router are retries of one request: it refuses a second one itself.
    """
    return key.room == other.room and key.router != other.router


def make_attempt(nonce: int, counter: int) -> int:
    """An attempt number that no other router, and no former life of this one, has used.

    Args:
        nonce: 32 random bits of this router process.
        counter: counts up in it.
    """
    if not 0 <= counter < 1 << NONCE_BITS or not 0 <= nonce < 1 << NONCE_BITS:
        raise ValueError(
            f"attempt of nonce={nonce} and counter={counter}: each has {NONCE_BITS} bits; a "
            "router that has used up its counter is restarted"
        )
    return nonce << NONCE_BITS | counter


@dataclass(frozen=True, slots=True)
class PinnedPair:
    """The two peers of an attempt, as Generate names them."""

    prefill: Peer
    decode: Peer
