"""Schedulers that forget a rule of their own; see mutations.py."""

from collections.abc import Sequence
from typing import Any

from inferkit.core.request import FinishReason, Request
from inferkit.kv_transfer.actions import Action, End, Release
from inferkit.kv_transfer.identity import TransferKey
from inferkit.scheduler.decode_disagg import DecodeDisaggScheduler
from inferkit.scheduler.disagg import DisaggScheduler, key_of
from inferkit.scheduler.prefill_disagg import PrefillDisaggScheduler


class FreesAtTheEnd(DisaggScheduler):
    """Blocks go with the answer, whatever a transfer still does with them."""

    def _on_end(self, action: End) -> None:
        request = self._live(action.key)
        super()._on_end(action)
        if request is not None:
            self.kv_cache.free(request.request_id)
            self._holders.pop(action.key, None)

    def _on_release(self, action: Release) -> None:
        self._ids.setdefault(action.key, 0)
        self._holders[action.key] = None
        super()._on_release(action)


class PrefillFreesAtTheEnd(FreesAtTheEnd, PrefillDisaggScheduler): ...


class DecodeFreesAtTheEnd(FreesAtTheEnd, DecodeDisaggScheduler): ...


class HoldsEarly(DisaggScheduler):
    """Requests that hold blocks before the transfer knows of it."""

    def _take_early(self, request: Request, num_tokens: int) -> None:
        if num_tokens > 0 and self.kv_cache.allocate_slots(
            request.request_id, num_computed_tokens=0, num_new_tokens=num_tokens
        ):
            self._holders[key_of(request)] = None

    def _is_early(self, key: TransferKey) -> bool:
        """Whether only this scheduler knows of its blocks."""
        raise NotImplementedError

    def _on_end(self, action: End) -> None:
        request = self._live(action.key)
        is_early = self._is_early(action.key)
        super()._on_end(action)
        if request is not None and is_early and action.key in self._holders:
            self.kv_cache.free(request.request_id)
            del self._holders[action.key]
            self._forget_key_if_over(action.key)


class TakesBlocksEarly(HoldsEarly, PrefillDisaggScheduler):
    """A prompt has its blocks as soon as there are any, whether decode is ready or not."""

    def _accept(self, request: Request) -> Sequence[Action]:
        actions = super()._accept(request)
        self._take_early(request, request.num_prompt_tokens)
        return actions

    def _is_early(self, key: TransferKey) -> bool:
        request_id = self._ids.get(key)
        waiting = [request.request_id for request in self.waiting_queue]
        return request_id in self.bootstrap_queue or request_id in waiting


class StartsPartsOfPrompts(PrefillDisaggScheduler):
    """A prompt begins when its first chunk has blocks."""

    def _has_room(self, request: Request, num_growing: int) -> bool:
        return True

    def _make_room(self, request: Request) -> bool:
        return False


class TakesPartsOfBlocks(HoldsEarly, DecodeDisaggScheduler):
    """A request takes the blocks that are there and waits for the others."""

    def _take_first_blocks(self, request: Request) -> bool:
        if super()._take_first_blocks(request):
            return True
        held = len(self.kv_cache.block_ids(request.request_id)["full_attention"])
        num_free = self.kv_cache.managers["full_attention"].pool.num_free
        num_tokens = min(request.num_prompt_tokens, (held + num_free) * self.kv_cache.block_size)
        self._take_early(request, num_tokens)
        return False

    def _is_early(self, key: TransferKey) -> bool:
        return self._ids.get(key) in self.prealloc_queue


class TakesWhatNeverFits(DisaggScheduler):
    def _refusal(self, request: Request) -> tuple[FinishReason, str] | None:
        return None


class PrefillTakesWhatNeverFits(TakesWhatNeverFits, PrefillDisaggScheduler): ...


class DecodeTakesWhatNeverFits(TakesWhatNeverFits, DecodeDisaggScheduler): ...


class TakesAnyBlock(DecodeDisaggScheduler):
    """As long as one is free."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.room.may_take = lambda request, num_tokens: True


class RetractsTheLast(DecodeDisaggScheduler):
    """A request that finds no other is retracted itself."""

    def _make_room(self, request: Request) -> bool:
        super()._make_room(request)
        if not self._copying and self.host_store.has_room_for(self._block_ids(request)):
            self._retract(request)
        return False
