"""Where a transfer stands, and how several ranks agree on it.

A rank's own view (a timer, a message, a slot that it sees) never changes what all ranks share; it
is a vote. Once per tick every rank of a group contributes one vector, the vectors meet in one MIN
all-reduce (a callable from outside), and all ranks act on the same result.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

AllReduceMin = Callable[[list[int]], list[int]]
"""Element-wise minimum over the vectors of all ranks; every rank enters, in the same order."""


class KVStatus(IntEnum):
    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


def update(current: KVStatus, new: KVStatus) -> KVStatus:
    """FAILED always wins and stays; otherwise a status only grows."""
    if KVStatus.FAILED in (current, new):
        return KVStatus.FAILED
    return max(current, new)


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's view of one record.

    A vote above the lowest is never taken back: what a rank has seen (a Handshake, a landed slot,
    a drained link) stays seen, so acting on the minimum a little later is safe.
    """

    status: KVStatus
    is_settled: bool = False
    """Nothing of this rank stands in the way of the record's other exit; see the record tables."""


def encode_votes(keys: Iterable[tuple[int, ...]], votes: Sequence[Vote]) -> list[int]:
    """The vector of a rank: a fingerprint of its records, then two entries per vote."""
    fingerprint = hash(tuple(keys)) >> 2  # the hash of integers is the same in every process
    vector = [fingerprint, -fingerprint]
    for vote in votes:
        vector += [int(vote.status), int(vote.is_settled)]
    return vector


def decode_votes(vector: Sequence[int]) -> list[Vote]:
    """The common view from the minimum of all vectors.

    Raises:
        ValueError: the ranks did not vote on the same records in the same order. Going on would
            let them free different blocks.
    """
    if vector[0] != -vector[1]:
        raise ValueError(
            f"ranks of one group voted on different requests (fingerprints {vector[0]} and "
            f"{-vector[1]}); every rank must be given the same requests in the same order"
        )
    return [Vote(KVStatus(vector[idx]), bool(vector[idx + 1])) for idx in range(2, len(vector), 2)]
