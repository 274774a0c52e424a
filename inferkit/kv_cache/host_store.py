"""Host memory that keeps the blocks of requests which have lost their place on the device."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from inferkit.core.errors import KVCacheError
from inferkit.kv_cache.block_pool import NULL_BLOCK
from inferkit.kv_cache.kv_cache_manager import KVCacheManager

AUTO_SHARE = 4
"""0 bytes = the device pools divided by this."""


class HostStore:
    """Reserved at the start, so that no request is in need of memory that is not there later.

    Each manager key gets the same share of its pool, in blocks. A block is copied as it is, bit
    for bit, in all layers. On every TP rank the calls come with equal arguments and give equal
    results. Not thread-safe: it belongs to the thread of the model.

    Args:
        caches: manager key -> every cache tensor of its layers; dimension 0 counts blocks, the
            null block included. On a CPU or on a device.
        num_bytes: host memory to reserve (0 = a quarter of the pools, or none if it is not needed).
        is_needed: whether blocks can run short at all, see `can_run_short`.
        is_pinned: page-locked memory, for a device that copies faster to it.
    """

    def __init__(
        self,
        *,
        caches: Mapping[str, Sequence[torch.Tensor]],
        num_bytes: int = 0,
        is_needed: bool = True,
        is_pinned: bool = False,
    ) -> None:
        if num_bytes < 0:
            raise ValueError(f"kv_cache.host_bytes={num_bytes}: allowed is 0 (automatic) or more")
        self._caches = {key: list(tensors) for key, tensors in caches.items()}
        pool_bytes = sum(t[1:].nbytes for tensors in self._caches.values() for t in tensors)
        automatic = pool_bytes // AUTO_SHARE if is_needed else 0
        wanted = min(num_bytes or automatic, pool_bytes)
        self._host: dict[str, list[torch.Tensor]] = {}
        self._free: dict[str, list[int]] = {}
        self._held: dict[int, dict[str, dict[int, int]]] = {}
        """Request -> manager key -> position in the request's block list -> host block."""
        for key, tensors in self._caches.items():
            num_blocks = (len(tensors[0]) - 1) * wanted // max(1, pool_bytes)
            self._free[key] = list(range(num_blocks))[::-1]
            self._host[key] = [_reserve(tensor, num_blocks, is_pinned) for tensor in tensors]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self._host.values() for tensor in tensors)

    @property
    def num_requests(self) -> int:
        return len(self._held)

    def num_free_blocks(self, manager_key: str) -> int:
        return len(self._free[manager_key])

    def num_held_blocks(self, request_id: int, manager_key: str) -> int:
        """Of a request; 0 where it is not here."""
        return len(self._held.get(request_id, {}).get(manager_key, ()))

    def has_room_for(self, block_ids: Mapping[str, Sequence[int]]) -> bool:
        """Whether all real blocks of a request fit now."""
        return all(
            len(ids) - list(ids).count(NULL_BLOCK) <= len(self._free[key])
            for key, ids in block_ids.items()
        )

    def save(self, request_id: int, block_ids: Mapping[str, Sequence[int]]) -> bool:
        """Copy the real blocks of a request here; they may be freed when this returns.

        `block_ids`: manager key -> blocks in token order, 0 = the null block. Returns False, and
        does nothing, where they do not fit.

        Raises:
            KVCacheError: the request is here already.
        """
        if request_id in self._held:
            raise KVCacheError(f"request {request_id} is in the host store already")
        if not self.has_room_for(block_ids):
            return False
        self._held[request_id] = {
            key: {
                position: self._free[key].pop()
                for position, block in enumerate(ids)
                if block != NULL_BLOCK
            }
            for key, ids in block_ids.items()
        }
        self._copy_out(request_id, block_ids)
        return True

    def _copy_out(self, request_id: int, block_ids: Mapping[str, Sequence[int]]) -> None:
        for key, places in self._held[request_id].items():
            sources = _index(block_ids[key][position] for position in places)
            targets = _index(places.values())
            for cache, host in zip(self._caches[key], self._host[key], strict=True):
                rows = cache.index_select(0, sources.to(cache.device))
                host.index_copy_(0, targets, rows.cpu())

    def restore(self, request_id: int, block_ids: Mapping[str, Sequence[int]]) -> None:
        """Fill the new blocks of a request; what is kept here stays until `drop`.

        A new block at a place that was not kept (it lies before a sliding window, or will be
        written next) stays as it is, and what was kept of a place without a block is not needed
        any more.

        Raises:
            KVCacheError: the request is not here.
        """
        for key, kept in self._of(request_id).items():
            ids = block_ids[key]
            pairs = [
                (host_block, ids[position])
                for position, host_block in kept.items()
                if position < len(ids) and ids[position] != NULL_BLOCK
            ]
            sources = _index(host_block for host_block, _ in pairs)
            targets = _index(block for _, block in pairs)
            for cache, host in zip(self._caches[key], self._host[key], strict=True):
                rows = host.index_select(0, sources)
                cache.index_copy_(0, targets.to(cache.device), rows.to(cache.device))

    def drop(self, request_id: int) -> None:
        """Give back what a request holds here.

        Raises:
            KVCacheError: the request is not here.
        """
        for key, kept in self._of(request_id).items():
            self._free[key].extend(reversed(kept.values()))
        del self._held[request_id]

    def check_integrity(self) -> None:
        """Raise KVCacheError unless free and held blocks add up."""
        for key, free in self._free.items():
            held = [block for kept in self._held.values() for block in kept[key].values()]
            num_blocks = len(self._host[key][0])
            if sorted(free + held) != list(range(num_blocks)):
                raise KVCacheError(f"{key}: free {free} and held {held} are not {num_blocks}")

    def _of(self, request_id: int) -> dict[str, dict[int, int]]:
        if request_id not in self._held:
            raise KVCacheError(f"request {request_id} is not in the host store")
        return self._held[request_id]


def left_for_pools(free_bytes: int, host_bytes: int) -> int:
    """Of memory that pools and store share, as on a CPU: what the pools may take.

    Args:
        host_bytes: of the store; 0 = automatic.
    """
    if host_bytes:
        return max(0, free_bytes - host_bytes)
    return free_bytes * AUTO_SHARE // (AUTO_SHARE + 1)


def can_run_short(kv_cache: KVCacheManager) -> bool:
    """Whether some pool does not hold as many of the longest requests as may be in flight."""
    return any(
        manager.pool.num_blocks - 1
        < (len(manager.tables) - 1) * manager.num_steady_blocks(kv_cache.max_model_len)
        for manager in kv_cache.managers.values()
    )


def _reserve(cache: torch.Tensor, num_blocks: int, is_pinned: bool) -> torch.Tensor:
    host = torch.empty((num_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=is_pinned)
    return host.fill_(0)  # touches every page: memory that is short is missed now


def _index(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
