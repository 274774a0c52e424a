"""The scheduler of a decode instance: takes prompts over that another instance has computed."""

import logging
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Protocol

from inferkit.core.batch import BatchRow
from inferkit.core.request import FinishReason, Request, RequestState, TokenLogprobs
from inferkit.kv_cache.host_store import HostStore
from inferkit.kv_transfer.actions import (
    Action,
    BlockIds,
    End,
    Finished,
    Landed,
    Release,
    Retracted,
)
from inferkit.kv_transfer.identity import PinnedPair, TransferKey
from inferkit.scheduler.decode_room import DecodeRoom
from inferkit.scheduler.disagg import (
    DisaggScheduler,
    Transfer,
    handoff_of,
    key_of,
    pinned_pair,
    remaining_ms,
)
from inferkit.scheduler.scheduler import MAX_HEAD_SKIPS, MAX_PASSERS

logger = logging.getLogger(__name__)


class DecodeTransfer(Transfer, Protocol):
    """`DecodeRecords` of this rank, and the memory that is written."""

    @property
    def num_free_slots(self) -> int: ...

    def accept(
        self,
        key: TransferKey,
        pair: PinnedPair,
        *,
        bootstrap_url: str,
        kv_len: int,
        seed: int,
        remaining_ms: int,
    ) -> Sequence[Action]: ...

    def admissible(self) -> Sequence[TransferKey]: ...

    def admit(self, key: TransferKey, block_ids: BlockIds) -> Sequence[Action]: ...

    def complete(self, key: TransferKey) -> Sequence[Action]: ...

    def retract(self, key: TransferKey) -> Sequence[Action] | None: ...

    def on_copied(self, key: TransferKey) -> Sequence[Action] | None: ...

    def resume(self, key: TransferKey) -> Sequence[Action]: ...


class DecodeDisaggScheduler(DisaggScheduler):
    """Decodes only: no prompt is ever computed here.

    prealloc --blocks, slot--> transfer --Landed--> running --finish rule--> finished
                                                    |    ^
                                            retract '-> retracted (in host memory)

    Rules where blocks run short. *Age* is the order of admission; `running_requests` keeps it.
    - A request is admitted with the blocks of its prompt and one more token, a slot and a place, or
      with nothing. `num_reserved_decode_tokens` per other request stay free. Smaller requests pass
      a head that lacks blocks at most `MAX_HEAD_SKIPS` times.
    - Blocks are taken only if the eldest can still come to its end afterwards (headroom.py);
      otherwise a request skips the step, or is not admitted.
    - Only for the eldest that runs, or for the eldest of all where it waits in host memory, a
      younger one is retracted: its blocks are copied to the host store, and are free when every
      rank has copied. So an older one always goes on; the last one that runs is never retracted
      for its own sake.
    - A retracted request comes back, bit for bit, before any new one is admitted.

    Args:
        host_store: where retracted requests are kept.
        num_reserved_decode_tokens: kept free per other request when one is admitted.
    """

    transfer: DecodeTransfer

    def __init__(
        self,
        *,
        transfer: DecodeTransfer,
        host_store: HostStore,
        num_reserved_decode_tokens: int = 64,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        # No prompt is computed, so none is too long for a step.
        self.enable_chunked_prefill = True
        self.transfer = transfer
        self.host_store = host_store
        self.num_reserved_decode_tokens = num_reserved_decode_tokens
        self.prealloc_queue: dict[int, Request] = {}
        """Wait for a route, blocks and a slot; hold nothing."""
        self.transfer_queue: dict[int, Request] = {}
        """Hold blocks and slot; prefill computes and writes."""
        self.retracted_queue: dict[int, Request] = {}
        """In host memory, or on the way there."""
        self._copying: dict[int, Request] = {}
        """Those of them whose device blocks are still held."""
        self._hosted: set[TransferKey] = set()
        """Those that hold a host area; answered ones included."""
        self._arrived: dict[int, list[int]] = {}
        self._ages: dict[int, int] = {}
        """Request -> number of its admission."""
        self._next_age = count()
        self.room = DecodeRoom(
            kv_cache=self.kv_cache,
            host_store=host_store,
            max_kv_len=self._max_kv_len,
            in_flight=self._in_flight,
            copying=self._copying,
        )

    # -- queues --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.running_requests)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._own_queues().values()))

    @property
    def num_in_flight(self) -> int:
        return super().num_in_flight + len(self.retracted_queue) - len(self._copying)

    def _own_queues(self) -> Mapping[str, dict[int, Request]]:
        return {
            "prealloc": self.prealloc_queue,
            "transfer": self.transfer_queue,
            "retracted": self.retracted_queue,
        }

    def advance_queues(self) -> dict[int, list[int]]:
        """Returns the first tokens that came from prefill."""
        self.room.changed()
        self._carry_out(self.transfer.tick())
        self._resume_retracted()
        if not self.retracted_queue:
            self._admit_new()
        arrived, self._arrived = self._arrived, {}
        return arrived

    # -- in and out ----------------------------------------------------------------------------

    def _accept(self, request: Request) -> Sequence[Action]:
        actions = self.transfer.accept(
            key_of(request),
            pinned_pair(request),
            bootstrap_url=handoff_of(request).pair.bootstrap_url,
            kv_len=request.num_prompt_tokens,
            seed=request.seed,
            remaining_ms=remaining_ms(request),
        )
        self.prealloc_queue[request.request_id] = request
        return actions

    def _on_action(self, action: Action) -> None:
        assert isinstance(action, Landed | Finished | Retracted), f"{action} is none of decode"
        request = self._live(action.key)
        if isinstance(action, Retracted) or request is None:
            return  # its blocks are released, which is all that counts
        token_id, logprobs = action.status.first_token, action.status.logprobs
        if isinstance(action, Landed):
            self._start(request, token_id, logprobs)
        else:
            self._take_first_token(request, token_id, logprobs)
            if request.finish_reason is None:
                request.finish_reason = FinishReason.STOP  # prefill knows a rule more

    def _start(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """The KV of the prompt is here."""
        del self.transfer_queue[request.request_id]
        self._insert_by_age(request)
        request.num_computed_tokens = request.num_prompt_tokens
        self._take_first_token(request, token_id, logprobs)
        if request.finish_reason is not None:
            self._finish(request, request.finish_reason)

    def _take_first_token(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> None:
        request.state = RequestState.RUNNING
        if logprobs is not None:
            request.output_logprobs.append(logprobs)
        self._arrived[request.request_id] = self._append(request, [token_id], self.clock())

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """A running request has ended by itself."""
        request.finish_reason = reason
        self._carry_out(self.transfer.complete(key_of(request)))

    def _on_end(self, action: End) -> None:
        request = self._live(action.key)
        if request is not None:
            self._ages.pop(request.request_id, None)
        super()._on_end(action)

    def _on_release(self, action: Release) -> None:
        request_id = self._ids[action.key]
        if action.blocks:
            self._copying.pop(request_id, None)
            self.room.changed()
        if action.host_area:
            self.host_store.drop(request_id)
            self._hosted.discard(action.key)
        super()._on_release(action)

    def _holds(self, key: TransferKey) -> bool:
        return key in self._hosted or super()._holds(key)

    def _leave_queue(self, request: Request) -> None:
        self._copying.pop(request.request_id, None)
        super()._leave_queue(request)
        self.room.changed()

    def _insert_by_age(self, request: Request) -> None:
        requests = [*self.running_requests.values(), request]
        requests.sort(key=self._age)
        self.running_requests = {request.request_id: request for request in requests}
        self.room.changed()

    def _age(self, request: Request) -> int:
        return self._ages[request.request_id]

    # -- admission -----------------------------------------------------------------------------

    def _admit_new(self) -> None:
        head: Request | None = None
        num_short = 0
        for key in self.transfer.admissible():
            is_full = self.num_in_flight >= self.max_num_requests
            if is_full or not self.transfer.num_free_slots or num_short > MAX_PASSERS:
                return
            request = self.prealloc_queue[self._ids[key]]
            if self._take_first_blocks(request):
                self._admit_one(request)
                if head is not None:
                    head.num_skips += 1
            else:
                num_short += 1
                head = head or request
            if head is not None and head.num_skips >= MAX_HEAD_SKIPS:
                return

    def _take_first_blocks(self, request: Request) -> bool:
        """Blocks of the prompt and of the first decode step, if there is one."""
        num_tokens = request.num_prompt_tokens + min(1, request.max_tokens - 1)
        num_reserved = self.num_reserved_decode_tokens
        are_free = all(
            manager.can_allocate(
                request.request_id,
                num_tokens=num_tokens,
                num_total=num_tokens,
                num_reserved_tokens=num_reserved,
            )
            for manager in self.kv_cache.managers.values()
        )
        # Looked at first, for it is cheap: a long queue is tried again in every tick.
        if not are_free or not self.room.may_take(request, num_tokens):
            return False
        has_blocks = self.kv_cache.allocate_slots(
            request.request_id,
            num_computed_tokens=0,
            num_new_tokens=num_tokens,
            num_reserved_tokens=num_reserved,
        )
        assert has_blocks, "the free blocks were looked at before"
        # Blocks before the window of the first decode step must not be asked for: prefill gives
        # them back while it computes the end of the prompt.
        return self.kv_cache.allocate_slots(
            request.request_id,
            num_computed_tokens=request.num_prompt_tokens,
            num_new_tokens=0,
        )

    def _admit_one(self, request: Request) -> None:
        request_id, key = request.request_id, key_of(request)
        del self.prealloc_queue[request_id]
        self.transfer_queue[request_id] = request
        self._holders[key] = None
        self._ages[request_id] = next(self._next_age)
        self.room.changed()
        request.num_skips = 0
        request.first_scheduled_time_s = self.clock()
        self._carry_out(self.transfer.admit(key, self._block_ids(request)))

    # -- blocks of running requests ------------------------------------------------------------

    def _allocate(self, request: Request, num_tokens: int) -> bool:
        if not self.room.may_take(request, request.num_computed_tokens + num_tokens):
            return False
        has_blocks = super()._allocate(request, num_tokens)
        if has_blocks:
            self.room.took(request)
        return has_blocks

    def _make_room(self, request: Request) -> bool:
        """The blocks of a retracted request come when every rank has copied them."""
        if request is next(iter(self.running_requests.values())):
            self._retract_for(request)
        return False

    def _in_flight(self) -> list[Request]:
        """All that hold blocks, or held some and come back; the eldest first."""
        queues = (self.running_requests, self.transfer_queue, self.retracted_queue)
        return sorted((r for queue in queues for r in queue.values()), key=self._age)

    # -- retraction ----------------------------------------------------------------------------

    def _retract_for(self, needy: Request) -> None:
        """Retract the youngest other whose copy fits and leaves the eldest of all enough."""
        if self._copying:
            return  # blocks come already
        eldest = self._in_flight()[0]
        for victim in reversed(list(self.running_requests.values())):
            if victim not in (eldest, needy) and self.room.may_retract(victim):
                self._retract(victim)
                return

    def _retract(self, request: Request) -> None:
        request_id, key = request.request_id, key_of(request)
        logger.info("request=%d retracted at %d tokens", request_id, request.num_tokens)
        del self.running_requests[request_id]
        self.retracted_queue[request_id] = self._copying[request_id] = request
        self._hosted.add(key)
        self.room.changed()
        request.num_preemptions += 1
        self._num_preempted += 1
        self._carry_out(self.transfer.retract(key) or ())
        is_saved = self.host_store.save(request_id, self._block_ids(request))
        assert is_saved, "the room in the host store was looked at before"
        self._carry_out(self.transfer.on_copied(key) or ())

    def _resume_retracted(self) -> None:
        """The eldest first, and none before it."""
        for request in sorted(self.retracted_queue.values(), key=self._age):
            if request.request_id in self._copying:
                return
            is_eldest = request is self._in_flight()[0]
            if not self._take_back(request, is_eldest):
                if is_eldest:
                    self._retract_for(request)
                return

    def _take_back(self, request: Request, is_eldest: bool) -> bool:
        """Blocks for what is computed; they are filled from the host store."""
        request_id, num_tokens = request.request_id, request.num_computed_tokens
        num_running = 0 if is_eldest else 1 + len(self.running_requests)
        if not self.room.may_return(request, num_running):
            return False
        if not self.room.may_take(request, num_tokens) or not self.kv_cache.allocate_slots(
            request_id, num_computed_tokens=num_tokens, num_new_tokens=0
        ):
            return False
        del self.retracted_queue[request_id]
        self._holders[key_of(request)] = None
        self._insert_by_age(request)
        self.host_store.restore(request_id, self._block_ids(request))
        self._carry_out(self.transfer.resume(key_of(request)))
        return True

    # -- steps ---------------------------------------------------------------------------------

    def _fills_a_block(self, row: BatchRow) -> bool:
        """Prompts are not computed here, so no prefix is looked for."""
        return False
