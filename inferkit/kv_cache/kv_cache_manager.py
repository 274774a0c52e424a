"""KV blocks of requests, across all attention types of a model. Knows no tensors.

A request's life here: `match_prefix` (optional) -> `allocate_slots` before every step ->
`publish` after it -> `free`. On every TP rank these calls come with equal arguments and give equal
results.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inferkit.core.cache_spec import CacheSpec
from inferkit.core.errors import ConfigError, KVCacheError
from inferkit.kv_cache.single_type_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from inferkit.kv_cache.sizing import CacheGroup, group_specs, size_pools

logger = logging.getLogger(__name__)


class KVCacheManager:
    """Coordinates one `SingleTypeKVCacheManager` per manager key.

    Args:
        specs: caches of all layers of the model on this rank.
        max_model_len: longest request in tokens.
        max_num_requests: requests that may hold blocks at the same time.
        free_bytes: device memory that is free before the cache is allocated.
        host_bytes: unused here; the decode role keeps retracted requests in it.
    """

    def __init__(
        self,
        *,
        specs: Sequence[CacheSpec],
        max_model_len: int,
        max_num_requests: int,
        free_bytes: int,
        block_size: int = 128,
        mem_fraction: float = 0.85,
        num_blocks: int = 0,
        enable_prefix_cache: bool = False,
        host_bytes: int = 0,
    ) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.groups = group_specs(specs)
        if enable_prefix_cache and any(group.block_size != block_size for group in self.groups):
            raise ConfigError(
                "kv_cache.enable_prefix_cache=true needs blocks of kv_cache.block_size="
                f"{block_size} in every layer, but this model has blocks of "
                f"{sorted({group.block_size for group in self.groups})} tokens (a contiguous cache "
                "has one block per request); set kv_cache.enable_prefix_cache=false"
            )
        self.num_blocks: Mapping[str, int] = size_pools(
            self.groups,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_requests=max_num_requests,
            enable_prefix_cache=enable_prefix_cache,
            available_bytes=int(free_bytes * mem_fraction),
        )
        self.managers: dict[str, SingleTypeKVCacheManager] = {
            group.manager_key: self._make_manager(group, max_num_requests) for group in self.groups
        }
        self._free_rows = list(range(max_num_requests, 0, -1))
        self._rows: dict[int, int] = {}
        self._hashes: dict[int, list[bytes]] = {}
        self._num_published: dict[int, int] = {}

    def _make_manager(self, group: CacheGroup, max_num_requests: int) -> SingleTypeKVCacheManager:
        common: dict[str, Any] = {
            "manager_key": group.manager_key,
            "block_size": group.block_size,
            "num_blocks": self.num_blocks[group.manager_key],
            "max_model_len": self.max_model_len,
            "max_num_requests": max_num_requests,
        }
        if group.window is not None:
            return SlidingWindowManager(**common, window=group.window)
        return FullAttentionManager(**common)

    # -- allocation ----------------------------------------------------------------------------

    def allocate_slots(
        self,
        request_id: int,
        *,
        num_computed_tokens: int,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        num_reserved_tokens: int = 0,
    ) -> bool:
        """Reserve KV blocks so that `num_computed_tokens + num_new_tokens` tokens fit.

        All attention types are checked before any block is taken: on False nothing was taken
        (window blocks that no query can see any more may have been given back).
        Returns False when a pool is short: the caller skips the request and tries again.

        Args:
            num_lookahead_tokens: tokens beyond the step that also get a place.
            num_reserved_tokens: tokens per other request in flight that must stay free.

        Raises:
            ValueError: a count is negative, or the total exceeds `max_model_len`.
        """
        num_tokens = num_computed_tokens + num_new_tokens
        if min(num_computed_tokens, num_new_tokens, num_lookahead_tokens) < 0:
            raise ValueError(f"request {request_id}: negative token counts cannot be allocated")
        if num_tokens > self.max_model_len:
            raise ValueError(
                f"request {request_id} needs {num_tokens} tokens, "
                f"max_model_len is {self.max_model_len}"
            )
        num_total = min(num_tokens + num_lookahead_tokens, self.max_model_len)
        for manager in self.managers.values():
            manager.remove_skipped(request_id, num_computed_tokens)
        has_row = request_id in self._rows or bool(self._free_rows)
        if not has_row or not all(
            manager.can_allocate(
                request_id,
                num_tokens=num_tokens,
                num_total=num_total,
                num_reserved_tokens=num_reserved_tokens,
            )
            for manager in self.managers.values()
        ):
            return False
        row = self._take_row(request_id)
        for manager in self.managers.values():
            manager.allocate(request_id, row, num_tokens=num_tokens, num_total=num_total)
        return True

    def has_room_for(self, request_id: int, num_tokens: int, num_blocks_held_back: int = 0) -> bool:
        """Whether the whole of a request of `num_tokens` would fit into what is free now.

        An admission that looked at the next chunk only would start requests that starve later.
        `num_blocks_held_back` blocks stay free in every pool, for requests that run already.
        """
        return all(
            manager.max_blocks_per_request(num_tokens) - manager.num_held_blocks(request_id)
            <= manager.pool.num_free - num_blocks_held_back
            for manager in self.managers.values()
        )

    def will_grow(self, request_id: int, num_tokens: int) -> bool:
        """Whether a running request still takes blocks until it has `num_tokens`."""
        return any(
            manager.num_steady_blocks(num_tokens) > manager.num_held_blocks(request_id)
            for manager in self.managers.values()
        )

    def capacity_error(self, num_tokens: int) -> str | None:
        """Why a request of `num_tokens` can never run here, or None if it can."""
        for key, manager in self.managers.items():
            need, usable = manager.max_blocks_per_request(num_tokens), manager.pool.num_blocks - 1
            if need > usable:
                return (
                    f"{num_tokens} tokens need {need} KV blocks of {manager.block_size} tokens, "
                    f"the {key} pool has {usable}; ask for fewer tokens or raise "
                    "kv_cache.num_blocks"
                )
        return None

    def free(self, request_id: int, *, will_return: bool = False) -> None:
        """Give back every block that a request holds; unknown requests hold nothing.

        `will_return` keeps the hashes of its tokens for the next `match_prefix`.
        """
        for manager in self.managers.values():
            manager.free(request_id)
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
        self._num_published.pop(request_id, None)
        if not will_return:
            self._hashes.pop(request_id, None)

    # -- prefix cache --------------------------------------------------------------------------

    def match_prefix(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Let a request that holds nothing start from cached blocks; returns cached tokens.

        At least the last token is left to compute, since its logits are wanted.
        """
        if not self.enable_prefix_cache or not self._free_rows:
            return 0
        assert request_id not in self._rows, f"request {request_id} already holds blocks"
        chain = self._chain(request_id, token_ids, (len(token_ids) - 1) // self.block_size)
        hits = [manager.longest_hit(chain) for manager in self.managers.values()]
        num_blocks = max(n for n in range(len(chain) + 1) if all(hit[n] for hit in hits))
        if num_blocks == 0:
            return 0
        row = self._take_row(request_id)
        for manager in self.managers.values():
            manager.adopt(request_id, row, chain[:num_blocks])
        self._num_published[request_id] = num_blocks
        return num_blocks * self.block_size

    def publish(self, request_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Make the request's full, computed blocks findable for others.

        Only tokens that are final may be counted in `num_computed_tokens`.
        """
        start = self._num_published.get(request_id, 0)
        end = num_computed_tokens // self.block_size
        if not self.enable_prefix_cache or end <= start:
            return
        chain = self._chain(request_id, token_ids, end)
        for block_idx in range(start, end):
            for manager in self.managers.values():
                manager.publish(request_id, block_idx, chain[block_idx])
        self._num_published[request_id] = end

    def _chain(self, request_id: int, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Hashes of the first blocks; each covers all tokens up to its end."""
        chain = self._hashes.setdefault(request_id, [])
        for idx in range(len(chain), num_blocks):
            block = token_ids[idx * self.block_size : (idx + 1) * self.block_size]
            digest = hashlib.blake2b(chain[idx - 1] if idx else b"", digest_size=16)
            digest.update(np.asarray(block, dtype=np.int64).tobytes())
            chain.append(digest.digest())
        return chain[:num_blocks]

    # -- what the engine reads -----------------------------------------------------------------

    def rows(self, request_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """[R] block-table row of each request; 0 for one that holds nothing (dummy rows)."""
        return np.array([self._rows.get(request_id, 0) for request_id in request_ids], np.int64)

    def block_tables(self, rows: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int32]]:
        """manager key -> [R, W] int32 block ids."""
        return {key: manager.tables[rows] for key, manager in self.managers.items()}

    def slot_mappings(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[np.int64]]:
        """manager key -> [T] slots, from the table row and position of each token."""
        return {
            key: manager.slot_mapping(rows, positions) for key, manager in self.managers.items()
        }

    # -- accounting ----------------------------------------------------------------------------

    def block_ids(self, request_id: int) -> dict[str, list[int]]:
        return {key: manager.block_ids(request_id) for key, manager in self.managers.items()}

    @property
    def num_used_blocks(self) -> int:
        return sum(manager.pool.num_used for manager in self.managers.values())

    @property
    def num_usable_blocks(self) -> int:
        return sum(manager.pool.num_blocks - 1 for manager in self.managers.values())

    def format_usage(self) -> str:
        """`key:used/usable` for each attention type, comma separated."""
        return ",".join(
            f"{key}:{manager.pool.num_used}/{manager.pool.num_blocks - 1}"
            for key, manager in self.managers.items()
        )

    def check_integrity(self) -> None:
        """Raise KVCacheError unless every block, table row and reference adds up."""
        for manager in self.managers.values():
            manager.check_integrity()
        taken = sorted(self._rows.values())
        if len(set(taken)) != len(taken) or set(taken) & set(self._free_rows):
            raise KVCacheError("two requests share a block-table row")

    def _take_row(self, request_id: int) -> int:
        if request_id not in self._rows:
            self._rows[request_id] = self._free_rows.pop()
        return self._rows[request_id]
