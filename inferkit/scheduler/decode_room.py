"""Which blocks a decode scheduler may hand out; looks at pools and host store, changes neither.

Two kinds of pools. In a *growing* one (full attention) a request holds more with every token: it
takes blocks as it needs them, as long as there is headroom (headroom.py). In a *bounded* one (a
sliding window) all that it may ever hold is set aside when it is admitted.

Where blocks are short every row asks in every step, so what requests hold is counted once and then
followed, until `changed` says that something else has happened.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from inferkit.core.request import Request
from inferkit.kv_cache.host_store import HostStore
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.kv_cache.single_type_manager import FullAttentionManager, SingleTypeKVCacheManager
from inferkit.scheduler.headroom import Headroom


@dataclass(kw_only=True)
class _Held:
    """What the requests in flight hold in one growing pool."""

    manager: SingleTypeKVCacheManager
    blocks: dict[int, int]
    """Request -> blocks that it keeps; 0 where it is in the host store."""
    num_copying: int
    """Blocks that are given back when they are copied."""
    largest_need: int


@dataclass(kw_only=True)
class _Count:
    requests: Sequence[Request]
    ids: frozenset[int]
    pools: list[_Held]


class DecodeRoom:
    """Args:
    max_kv_len: tokens of a request that may come to need a place.
    in_flight: requests that hold blocks, or held some and come back; the eldest first.
    copying: ids of those whose blocks are given back as soon as they are copied.
    """

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        host_store: HostStore,
        max_kv_len: Callable[[Request], int],
        in_flight: Callable[[], Sequence[Request]],
        copying: Collection[int],
    ) -> None:
        self.kv_cache = kv_cache
        self.host_store = host_store
        self.max_kv_len = max_kv_len
        self.in_flight = in_flight
        self.copying = copying
        managers = kv_cache.managers.values()
        self.growing = [m for m in managers if isinstance(m, FullAttentionManager)]
        self.bounded = [m for m in managers if not isinstance(m, FullAttentionManager)]
        self._count: _Count | None = None

    def changed(self) -> None:
        """A request has come, gone, been retracted or resumed."""
        self._count = None

    def took(self, request: Request) -> None:
        """A request that was there has taken blocks."""
        for pool in self._count.pools if self._count is not None else ():
            pool.blocks[request.request_id] = pool.manager.num_held_blocks(request.request_id)

    def may_take(self, request: Request, num_tokens: int) -> bool:
        """Whether `request` may have blocks for `num_tokens`, as far as others go."""
        request_id = request.request_id
        takes = [
            manager.num_new_blocks(request_id, num_tokens=num_tokens, num_total=num_tokens)
            for manager in self.growing
        ]
        if not self.bounded and all(map(_is_roomy, self.growing, takes)):
            return True  # as everywhere where blocks are not short
        count = self._look()
        is_new = request_id not in count.ids
        if is_new and not all(self._has_place(m, request, count) for m in self.bounded):
            return False
        if not is_new and request is count.requests[0]:
            return True  # the headroom is for it
        return all(
            self._headroom(pool, count, taker=request, takes=num_blocks)
            for pool, num_blocks in zip(count.pools, takes, strict=True)
            if num_blocks
        )

    def may_retract(self, victim: Request) -> bool:
        """Whether a copy of `victim` fits, and leaves room for those that must follow it."""
        block_ids = self.kv_cache.block_ids(victim.request_id)
        count = self._look()
        return self.host_store.has_room_for(block_ids) and all(
            self._headroom(pool, count, victim=victim) for pool in count.pools
        )

    def may_return(self, request: Request, num_running: int) -> bool:
        """Whether a retracted request finds its blocks, and one more for each that runs then.

        Without these it would be retracted again at once.
        """
        return all(
            manager.max_blocks_per_request(request.num_computed_tokens) + num_running
            <= manager.pool.num_free
            for manager in self.growing
        )

    def _has_place(
        self, manager: SingleTypeKVCacheManager, request: Request, count: _Count
    ) -> bool:
        missing = (
            manager.num_steady_blocks(self.max_kv_len(other))
            - manager.num_held_blocks(other.request_id)
            for other in (*count.requests, request)
        )
        return sum(max(0, num_blocks) for num_blocks in missing) <= manager.pool.num_free

    def _headroom(
        self,
        pool: _Held,
        count: _Count,
        *,
        taker: Request | None = None,
        takes: int = 0,
        victim: Request | None = None,
    ) -> bool:
        """Whether the eldest comes to its end, if `taker` takes so many blocks, or `victim` is
        retracted."""
        manager, key = pool.manager, pool.manager.manager_key
        num_free = manager.pool.num_free + pool.num_copying - takes
        num_host_free = self.host_store.num_free_blocks(key)
        largest_need = pool.largest_need
        blocks = dict(pool.blocks)
        if taker is not None:
            # What takes blocks now leaves the host store, if it was there.
            num_host_free += self.host_store.num_held_blocks(taker.request_id, key)
            blocks[taker.request_id] = blocks.get(taker.request_id, 0) + takes
            largest_need = max(largest_need, manager.max_blocks_per_request(self.max_kv_len(taker)))
        if victim is not None:
            num_blocks = blocks.pop(victim.request_id)
            num_free, num_host_free = num_free + num_blocks, num_host_free - num_blocks
        eldest = count.requests[0] if count.requests else taker
        assert eldest is not None, "somebody takes blocks, or is retracted"
        held_by_eldest = blocks.pop(eldest.request_id, 0)
        return Headroom(
            num_free=num_free,
            num_host_free=num_host_free,
            largest_need=largest_need,
            held_by_eldest=held_by_eldest,
            held_by_others=list(blocks.values()),
            max_retractions=self._max_retractions(victim is not None),
        ).is_enough

    def _max_retractions(self, is_one_less: bool) -> int | None:
        """Requests that the host store takes in the bounded pools."""
        counts = [
            self.host_store.num_free_blocks(manager.manager_key)
            // manager.num_steady_blocks(self.kv_cache.max_model_len)
            for manager in self.bounded
        ]
        return max(0, min(counts) - is_one_less) if counts else None

    def _look(self) -> _Count:
        if self._count is None:
            requests = self.in_flight()
            pools = [self._held(manager, requests) for manager in self.growing]
            ids = frozenset(request.request_id for request in requests)
            self._count = _Count(requests=requests, ids=ids, pools=pools)
        return self._count

    def _held(self, manager: SingleTypeKVCacheManager, requests: Sequence[Request]) -> _Held:
        blocks = {r.request_id: manager.num_held_blocks(r.request_id) for r in requests}
        num_copying = sum(blocks.pop(request_id) for request_id in self.copying)
        longest = max(map(self.max_kv_len, requests), default=0)
        return _Held(
            manager=manager,
            blocks=blocks,
            num_copying=num_copying,
            largest_need=manager.max_blocks_per_request(longest),
        )


def _is_roomy(manager: SingleTypeKVCacheManager, num_blocks: int) -> bool:
    """Any request fits besides: nothing has to be counted."""
    longest = manager.tables.shape[1]
    return longest + num_blocks <= manager.pool.num_free
