"""The logical blocks of each request under one attention type.

A request's list has one entry per `block_size` tokens, in order; an entry that is no longer or not
yet needed is the null block. All tokens of a step may be written to the null block if nobody will
read them from the cache later: attention inside a step reads the step's own keys and values.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inferkit.core.cache_spec import window_blocks
from inferkit.core.errors import KVCacheError
from inferkit.kv_cache.block_pool import NULL_BLOCK, BlockPool


class SingleTypeKVCacheManager(ABC):
    """Base of full attention and sliding window; a subclass says which blocks must be real.

    `tables` is [max_num_requests + 1, W] int32; row 0 belongs to nobody and stays null.
    """

    def __init__(
        self,
        *,
        manager_key: str,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        max_num_requests: int,
    ) -> None:
        self.manager_key = manager_key
        self.block_size = block_size
        self.pool = BlockPool(num_blocks=num_blocks)
        self.tables = np.zeros(
            (max_num_requests + 1, math.ceil(max_model_len / block_size)), dtype=np.int32
        )
        self._rows: dict[int, int] = {}
        self._blocks: dict[int, list[int]] = {}

    # -- what a subclass decides ---------------------------------------------------------------

    @abstractmethod
    def first_real_block(self, num_tokens_after_step: int) -> int:
        """Index of the first block that anybody reads after a step which ends at this length."""

    @abstractmethod
    def max_blocks_per_request(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` holds at most at any one time."""

    @abstractmethod
    def num_steady_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` holds at most while it decodes."""

    @abstractmethod
    def blocks_held_back(self, request_id: int, num_reserved_tokens: int) -> int:
        """Free blocks that a new allocation must leave to other requests."""

    @abstractmethod
    def longest_hit(self, content_hashes: Sequence[bytes]) -> list[bool]:
        """Entry n: a request may start with n cached blocks of this chain (n = 0..len)."""

    # -- allocation ----------------------------------------------------------------------------

    def num_new_blocks(self, request_id: int, *, num_tokens: int, num_total: int) -> int:
        """Real blocks to take so that `num_total` tokens have a place when the step ends at
        `num_tokens` (`num_total` >= `num_tokens`; the rest is lookahead)."""
        owned = len(self._blocks.get(request_id, ()))
        total = math.ceil(num_total / self.block_size)
        return max(0, total - max(owned, self.first_real_block(num_tokens)))

    def can_allocate(
        self, request_id: int, *, num_tokens: int, num_total: int, num_reserved_tokens: int
    ) -> bool:
        need = self.num_new_blocks(request_id, num_tokens=num_tokens, num_total=num_total)
        return need <= self.pool.num_free - self.blocks_held_back(request_id, num_reserved_tokens)

    def allocate(self, request_id: int, row: int, *, num_tokens: int, num_total: int) -> None:
        blocks = self._blocks.setdefault(request_id, [])
        self._rows[request_id] = row
        start, total = len(blocks), math.ceil(num_total / self.block_size)
        first_real = min(total, self.first_real_block(num_tokens))
        blocks.extend([NULL_BLOCK] * (first_real - start))
        blocks.extend(self.pool.get_new_blocks(max(0, total - len(blocks))))
        self.tables[row, start : len(blocks)] = blocks[start:]

    def adopt(self, request_id: int, row: int, content_hashes: Sequence[bytes]) -> None:
        """Start a request with the cached blocks of this chain (see `longest_hit`)."""
        num_tokens = len(content_hashes) * self.block_size
        first_real = min(len(content_hashes), self.first_real_block(num_tokens))
        found = [self.pool.find(content_hash) for content_hash in content_hashes[first_real:]]
        hits = [block_id for block_id in found if block_id is not None]
        assert len(hits) == len(found), "adopt() beyond longest_hit()"
        self.pool.touch(hits)
        blocks = [NULL_BLOCK] * first_real + hits
        self._blocks[request_id] = blocks
        self._rows[request_id] = row
        self.tables[row, : len(blocks)] = blocks

    @abstractmethod
    def remove_skipped(self, request_id: int, num_computed_tokens: int) -> None:
        """Free blocks that no later query of the request can see."""

    def publish(self, request_id: int, block_idx: int, content_hash: bytes) -> None:
        """Make the request's block findable, unless it is the null block."""
        block_id = self._blocks[request_id][block_idx]
        if block_id != NULL_BLOCK:
            self.pool.publish(block_id, content_hash)

    def free(self, request_id: int) -> None:
        """Give back all blocks, the last first: the start of a prefix is reused most."""
        blocks = self._blocks.pop(request_id, None)
        if blocks is None:
            return
        self.pool.free_blocks([block_id for block_id in reversed(blocks) if block_id])
        self.tables[self._rows.pop(request_id)] = NULL_BLOCK

    def block_ids(self, request_id: int) -> list[int]:
        return list(self._blocks.get(request_id, ()))

    def num_held_blocks(self, request_id: int) -> int:
        """Real blocks of a request."""
        blocks = self._blocks.get(request_id, [])
        return len(blocks) - blocks.count(NULL_BLOCK)

    def row(self, request_id: int) -> int:
        """Row of `tables`; 0, the null row, for a request without blocks."""
        return self._rows.get(request_id, 0)

    @property
    def num_owners(self) -> int:
        return len(self._blocks)

    def slot_mapping(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """[T] slot of each token, from its table row [T] and position [T]."""
        block_ids = self.tables[rows, positions // self.block_size].astype(np.int64)
        return block_ids * self.block_size + positions % self.block_size

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        refs = [0] * self.pool.num_blocks
        for request_id, blocks in self._blocks.items():
            row = self.tables[self._rows[request_id]]
            if row[: len(blocks)].tolist() != blocks or row[len(blocks) :].any():
                raise KVCacheError(f"block table of request {request_id} differs from its blocks")
            for block_id in blocks:
                if block_id != NULL_BLOCK:
                    refs[block_id] += 1
        if refs != self.pool.ref_counts:
            raise KVCacheError(f"{self.manager_key}: requests hold other blocks than are counted")


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every token is read until the request ends."""

    def first_real_block(self, num_tokens_after_step: int) -> int:
        return 0

    def max_blocks_per_request(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.block_size)

    def num_steady_blocks(self, num_tokens: int) -> int:
        return self.max_blocks_per_request(num_tokens)

    def blocks_held_back(self, request_id: int, num_reserved_tokens: int) -> int:
        num_others = self.num_owners - (request_id in self._blocks)
        return math.ceil(num_reserved_tokens / self.block_size) * num_others

    def longest_hit(self, content_hashes: Sequence[bytes]) -> list[bool]:
        hits = [True]
        for content_hash in content_hashes:
            hits.append(hits[-1] and self.pool.find(content_hash) is not None)
        return hits

    def remove_skipped(self, request_id: int, num_computed_tokens: int) -> None:
        """Every block stays visible."""


class SlidingWindowManager(SingleTypeKVCacheManager):
    """A query at position p sees [p - window + 1, p]; older blocks become null and are freed."""

    def __init__(self, *, window: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.window = window
        self._num_skipped: dict[int, int] = {}
        """Leading blocks of each request that are null for good."""

    def first_real_block(self, num_tokens_after_step: int) -> int:
        # The next query needs [num_tokens_after_step - window + 1, ...); the two tokens more are
        # the reference's (section 5.3) and keep its block lists equal to ours.
        return max(0, num_tokens_after_step - 1 - self.window) // self.block_size

    def max_blocks_per_request(self, num_tokens: int) -> int:
        # While a chunk is computed both its context and its own tail are held.
        return min(
            math.ceil(num_tokens / self.block_size),
            2 * window_blocks(self.window, self.block_size),
        )

    def num_steady_blocks(self, num_tokens: int) -> int:
        return min(
            math.ceil(num_tokens / self.block_size), window_blocks(self.window, self.block_size)
        )

    def blocks_held_back(self, request_id: int, num_reserved_tokens: int) -> int:
        return 0

    def longest_hit(self, content_hashes: Sequence[bytes]) -> list[bool]:
        hits, run = [True], 0
        for num_blocks, content_hash in enumerate(content_hashes, start=1):
            run = run + 1 if self.pool.find(content_hash) is not None else 0
            needed = num_blocks - self.first_real_block(num_blocks * self.block_size)
            hits.append(run >= needed)
        return hits

    def remove_skipped(self, request_id: int, num_computed_tokens: int) -> None:
        """Blocks wholly before the window of the query at `num_computed_tokens` are freed."""
        blocks = self._blocks.get(request_id, [])
        start = self._num_skipped.get(request_id, 0)
        end = min(len(blocks), max(0, num_computed_tokens - self.window + 1) // self.block_size)
        if end <= start:
            return
        skipped = [block_id for block_id in blocks[start:end] if block_id != NULL_BLOCK]
        blocks[start:end] = [NULL_BLOCK] * (end - start)
        self.tables[self._rows[request_id], start:end] = NULL_BLOCK
        self._num_skipped[request_id] = end
        self.pool.free_blocks(skipped)

    def free(self, request_id: int) -> None:
        super().free(request_id)
        self._num_skipped.pop(request_id, None)
