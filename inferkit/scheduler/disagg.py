"""What both halves of a shared request have in common: a transfer that says how they go on.

The transfer (a manager of `kv_transfer`) holds the state machine of every hand-off. A scheduler
calls it at common events, in the same order on every rank, and carries out what it answers:
`End` finishes a request, `Release` gives its blocks back. The two may come far apart: an aborted
request is answered at once, its blocks follow when no write can touch them any more.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from inferkit.core.errors import ConfigError, RequestError
from inferkit.core.request import FinishReason, Handoff, Request
from inferkit.kv_transfer.actions import Action, Code, End, Release
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey
from inferkit.scheduler.scheduler import Scheduler

REASONS: Mapping[Code, FinishReason] = {
    Code.REFUSED: FinishReason.REFUSED,
    Code.CONFLICT: FinishReason.CONFLICT,
    Code.CANCELLED: FinishReason.ABORT,
    Code.UNAVAILABLE: FinishReason.UNAVAILABLE,
}

MAX_REMAINING_MS = 1_800_000
"""Of a request whose sender names no limit; no deadline is longer."""


class Transfer(Protocol):
    """Of either side. Each call returns the actions that concern the scheduler, in order."""

    def cancel(self, key: TransferKey) -> Sequence[Action]: ...

    def tick(self) -> Sequence[Action]: ...

    def stats(self) -> dict[str, int]: ...


class DisaggScheduler(Scheduler, ABC):
    """Base of `PrefillDisaggScheduler` and `DecodeDisaggScheduler`.

    A request is in exactly one queue until it is finished. What it holds outlives that where a
    transfer still uses it: then only its key is kept, until `Release`.

    Raises:
        ConfigError: `fixed_steps`, which means nothing where two instances share a request.
    """

    transfer: Transfer

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.fixed_steps:
            raise ConfigError(
                "scheduler.fixed_steps=true is for offline runs; a prefill or decode role ends "
                "each request where its output ends"
            )
        self._ids: dict[TransferKey, int] = {}
        """Of every request that the transfer knows, or that holds blocks."""
        self._holders: dict[TransferKey, None] = {}
        """Those that hold device blocks, in the order in which they took them."""

    # -- queues --------------------------------------------------------------------------------

    @property
    def has_handoffs(self) -> bool:
        return bool(self._ids)

    def hand_off_stats(self) -> dict[str, int]:
        return {"num_known": len(self._ids), **self.transfer.stats()}

    @property
    def num_in_flight(self) -> int:
        """Requests with device blocks, those included that are answered and drain."""
        return len(self._holders)

    @abstractmethod
    def _own_queues(self) -> Mapping[str, dict[int, Request]]:
        """Name in the status line -> queue, beside `waiting_queue` and `running_requests`."""

    def _queue_lengths(self) -> dict[str, int]:
        lengths = {name: len(queue) for name, queue in self._own_queues().items()}
        return {**lengths, "draining": self._num_draining()}

    def _num_draining(self) -> int:
        return sum(self._live(key) is None for key in self._holders)

    def _leave_queue(self, request: Request) -> None:
        for queue in self._own_queues().values():
            if queue.pop(request.request_id, None) is not None:
                return
        super()._leave_queue(request)

    # -- requests in and out -------------------------------------------------------------------

    def _refusal(self, request: Request) -> tuple[FinishReason, str] | None:
        if request.handoff is None:
            return FinishReason.REFUSED, (
                "this instance computes one half of a request, and this one names no other half; "
                "send it to the router, or to an instance with +role=serve"
            )
        return super()._refusal(request)

    def _enqueue(self, request: Request) -> None:
        key = key_of(request)
        self._ids.setdefault(key, request.request_id)
        try:
            self._carry_out(self._accept(request))
        except RequestError:
            if self._ids[key] == request.request_id:
                del self._ids[key]
            del self._requests[request.request_id]
            raise

    @abstractmethod
    def _accept(self, request: Request) -> Sequence[Action]:
        """Put the request into its first queue and tell the transfer.

        Raises:
            RequestError: the attempt was used before; the request is in no queue.
        """

    def abort(self, request_id: int) -> None:
        request = self._requests.get(request_id)
        if request is not None and not request.is_finished:
            self._carry_out(self.transfer.cancel(key_of(request)))

    # -- what the transfer says ----------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, End):
                self._on_end(action)
            elif isinstance(action, Release):
                self._on_release(action)
            else:
                self._on_action(action)

    @abstractmethod
    def _on_action(self, action: Action) -> None:
        """An action of one side only."""

    def _on_end(self, action: End) -> None:
        request = self._live(action.key)
        if request is None:
            return
        if action.code is Code.OK:
            # Of a prefill half whose first token ends nothing: its share, one token, is done.
            reason = request.finish_reason or FinishReason.LENGTH
        else:
            reason = REASONS[action.code]
            request.finish_detail = action.reason
        self._retire(request, reason)
        if action.key not in self._holders:
            self.kv_cache.free(request.request_id)  # it holds none, but hashes of its prompt
        self._forget_key_if_over(action.key)

    def _on_release(self, action: Release) -> None:
        if action.blocks:
            self.kv_cache.free(self._ids[action.key])
            del self._holders[action.key]
        self._forget_key_if_over(action.key)

    def _forget_key_if_over(self, key: TransferKey) -> None:
        if self._live(key) is None and not self._holds(key):
            self._ids.pop(key, None)

    def _holds(self, key: TransferKey) -> bool:
        return key in self._holders

    def _live(self, key: TransferKey) -> Request | None:
        """The request of a key, unless it is answered already."""
        request_id = self._ids.get(key)
        request = None if request_id is None else self._requests.get(request_id)
        return None if request is None or request.is_finished else request

    def _block_ids(self, request: Request) -> dict[str, tuple[int, ...]]:
        """As they are now; a window moves on."""
        block_ids = self.kv_cache.block_ids(request.request_id)
        return {key: tuple(ids) for key, ids in block_ids.items()}


def handoff_of(request: Request) -> Handoff:
    assert request.handoff is not None, "a request without another half is refused"
    return request.handoff


def remaining_ms(request: Request) -> int:
    """Time that was left when the request arrived."""
    return handoff_of(request).remaining_ms or MAX_REMAINING_MS


def key_of(request: Request) -> TransferKey:
    handoff = handoff_of(request)
    return TransferKey(handoff.room, handoff.attempt)


def pinned_pair(request: Request) -> PinnedPair:
    pair = handoff_of(request).pair
    return PinnedPair(
        prefill=Peer(pair.prefill_id, pair.prefill_epoch),
        decode=Peer(pair.decode_id, pair.decode_epoch),
    )
