"""What requests really are: their prompts, and the only answers that are right."""

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from inferkit.kv_transfer.identity import PinnedPair, TransferKey

BLOCK_SIZE = 4
EOS = 2
ENDS_AT_ONCE = 3
"""A prompt that ends with this token is answered with EOS alone."""
MAX_KV_LEN = 63
MAX_ATTEMPT = 63


class Violation(AssertionError):
    """A property of protocol.md section 7 does not hold."""


def predict(token_ids: Sequence[int]) -> int:
    """What the simulated model says after these tokens: any change of them changes it."""
    if token_ids[-1] == ENDS_AT_ONCE:
        return EOS
    return zlib.crc32(array("q", token_ids).tobytes()) % 50_000 + 1_000


@dataclass(frozen=True, repr=False)
class Ghost:
    """What an attempt of a request really is.

    Prompts of two attempts of one request differ, so that bytes, and answers, show whose they are.
    """

    request: int
    attempt: int
    kv_len: int
    max_tokens: int = 3
    finishes: bool = False
    """The first token ends it."""
    num_shared: int = 0
    """Leading tokens that all prompts have in common, so that prefill computes them once."""

    def __repr__(self) -> str:
        return f"request {self.request}, attempt {self.attempt}"

    @cached_property
    def prompt(self) -> list[int]:
        assert self.kv_len <= MAX_KV_LEN and self.attempt <= MAX_ATTEMPT
        first = 100_000 + (self.request * (MAX_ATTEMPT + 1) + self.attempt) * (MAX_KV_LEN + 1)
        num_shared = min(self.num_shared, self.kv_len - 1)
        token_ids = [*range(10, 10 + num_shared), *range(first + num_shared, first + self.kv_len)]
        if self.finishes:
            token_ids[-1] = ENDS_AT_ONCE
        return token_ids

    @cached_property
    def answer(self) -> list[int]:
        token_ids = list(self.prompt)
        while len(token_ids) < self.kv_len + self.max_tokens:
            token_ids.append(predict(token_ids))
            if token_ids[-1] == EOS:
                break
        return token_ids[self.kv_len :]

    def num_blocks(self, *, is_decode: bool) -> int:
        """That it needs on one side at most."""
        num_tokens = self.kv_len + (self.max_tokens - 1 if is_decode else 0)
        return -(-num_tokens // BLOCK_SIZE)


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
