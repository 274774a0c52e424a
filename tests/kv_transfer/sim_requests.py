"""What requests really are, and the blocks of one rank."""

import zlib
from dataclasses import dataclass, field

from inferkit.kv_transfer.identity import PinnedPair, TransferKey

KEY = "full_attention"
BLOCK_SIZE = 4


class Violation(AssertionError):
    """A property of protocol.md section 7 does not hold."""


@dataclass(frozen=True, repr=False)
class Ghost:
    """What a request really is; the protocol never sees it."""

    request: int
    attempt: int
    kv_len: int
    num_chunks: int = 1
    finishes: bool = False
    """The first token ends it."""
    is_refused: bool = False
    """Prefill answers 400."""
    never_fits: bool = False
    """Decode answers 400."""
    num_steps: int = 2
    """Decode steps until it is complete."""

    def __repr__(self) -> str:
        return f"request {self.request}, attempt {self.attempt}"

    @property
    def num_blocks(self) -> int:
        return -(-self.kv_len // BLOCK_SIZE)

    @property
    def first_token(self) -> int:
        return zlib.crc32(repr((self.request, self.kv_len)).encode()) % 50_000


@dataclass(frozen=True)
class Generate:
    """One leg of an attempt."""

    key: TransferKey
    pair: PinnedPair
    ghost: Ghost
    remaining_ms: int


@dataclass(frozen=True)
class Cancel:
    key: TransferKey


@dataclass
class Pool:
    """Blocks 1..size of one rank."""

    size: int
    free: list[int] = field(default_factory=list)
    held: dict[TransferKey, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.size + 1))

    def take(self, key: TransferKey, num: int) -> tuple[int, ...]:
        assert key not in self.held, f"{key} takes blocks twice"
        self.held[key] = tuple(self.free[:num])
        del self.free[:num]
        return self.held[key]

    def give_back(self, key: TransferKey) -> None:
        if key not in self.held:
            raise Violation(f"{key} gives back blocks that it does not hold")
        self.free += self.held.pop(key)

    def check(self) -> None:
        held = [block for blocks in self.held.values() for block in blocks]
        if sorted(held + self.free) != list(range(1, self.size + 1)):
            raise Violation(f"pool: held {held} and free {self.free} are not 1..{self.size}")
