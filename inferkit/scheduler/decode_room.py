"""Which blocks a decode scheduler may hand out; looks at pools and host store, changes neither.

Two kinds of pools. In a *growing* one (full attention) a request holds more with every token: it
takes blocks as it needs them, as long as there is headroom (headroom.py). In a *bounded* one (a
sliding window) all that it may ever hold is set aside when it is admitted.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain

from inferkit.core.request import Request
from inferkit.kv_cache.host_store import HostStore
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.kv_cache.single_type_manager import FullAttentionManager, SingleTypeKVCacheManager
from inferkit.scheduler.headroom import Headroom


class DecodeRoom:
    """Args:
    max_kv_len: tokens of a request that may come to need a place.
    """

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        host_store: HostStore,
        max_kv_len: Callable[[Request], int],
    ) -> None:
        self.kv_cache = kv_cache
        self.host_store = host_store
        self.max_kv_len = max_kv_len
        managers = kv_cache.managers.values()
        self.growing = [m for m in managers if isinstance(m, FullAttentionManager)]
        self.bounded = [m for m in managers if not isinstance(m, FullAttentionManager)]

    def may_take(
        self,
        request: Request,
        num_tokens: int,
        in_flight: Callable[[], Sequence[Request]],
        copying: Collection[int],
    ) -> bool:
        """Whether `request` may have blocks for `num_tokens`, as far as others go.

        Args:
            in_flight: requests that hold blocks, or held some and come back; the eldest first.
            copying: ids of those whose blocks are given back as soon as they are copied.
        """
        takes = {
            manager: manager.num_new_blocks(
                request.request_id, num_tokens=num_tokens, num_total=num_tokens
            )
            for manager in chain(self.growing, self.bounded)
        }
        if not any(takes.values()):
            return True
        if not self.bounded and all(map(self._is_roomy, takes, takes.values())):
            return True
        requests = in_flight()
        if request not in requests:
            requests = [*requests, request]
            if not all(self._has_place(manager, requests) for manager in self.bounded):
                return False
        elif request is requests[0]:
            return True  # the headroom is for it
        return all(
            self._headroom(manager, requests, copying, {request.request_id: takes[manager]})
            for manager in self.growing
            if takes[manager]
        )

    def may_retract(
        self, victim: Request, in_flight: Sequence[Request], copying: Collection[int]
    ) -> bool:
        """Whether a copy of `victim` fits, and leaves room for those that must follow it."""
        block_ids = self.kv_cache.block_ids(victim.request_id)
        return self.host_store.has_room_for(block_ids) and all(
            self._headroom(manager, in_flight, copying, {}, victim) for manager in self.growing
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

    def _is_roomy(self, manager: SingleTypeKVCacheManager, num_blocks: int) -> bool:
        """Any request fits besides: nothing has to be counted."""
        longest = manager.max_blocks_per_request(self.kv_cache.max_model_len)
        return longest + num_blocks <= manager.pool.num_free

    def _has_place(self, manager: SingleTypeKVCacheManager, requests: Sequence[Request]) -> bool:
        missing = (
            manager.num_steady_blocks(self.max_kv_len(request))
            - manager.num_held_blocks(request.request_id)
            for request in requests
        )
        return sum(max(0, num_blocks) for num_blocks in missing) <= manager.pool.num_free

    def _headroom(
        self,
        manager: SingleTypeKVCacheManager,
        requests: Sequence[Request],
        copying: Collection[int],
        takes: Mapping[int, int],
        victim: Request | None = None,
    ) -> bool:
        """Whether the eldest comes to its end, if requests take so many blocks of a pool and
        `victim` is retracted."""
        held = {
            request.request_id: manager.num_held_blocks(request.request_id)
            + takes.get(request.request_id, 0)
            for request in requests
            if request.request_id not in copying
        }
        key = manager.manager_key
        num_host_free = self.host_store.num_free_blocks(key)
        # What takes blocks now leaves the host store, if it was there.
        num_host_free += sum(self.host_store.num_held_blocks(idx, key) for idx in takes)
        num_free = manager.pool.num_free - sum(takes.values())
        num_free += sum(manager.num_held_blocks(request_id) for request_id in copying)
        if victim is not None:
            num_blocks = held.pop(victim.request_id)
            num_free, num_host_free = num_free + num_blocks, num_host_free - num_blocks
        held_by_eldest = held.pop(requests[0].request_id, 0)
        return Headroom(
            num_free=num_free,
            num_host_free=num_host_free,
            largest_need=max(
                manager.max_blocks_per_request(self.max_kv_len(request)) for request in requests
            ),
            held_by_eldest=held_by_eldest,
            held_by_others=[num_blocks for num_blocks in held.values() if num_blocks],
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
