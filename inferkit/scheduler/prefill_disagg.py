"""The scheduler of a prefill instance: computes prompts and hands their KV over."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from inferkit.core.batch import Batch, BatchRow
from inferkit.core.request import Request
from inferkit.core.step_output import StepOutput
from inferkit.kv_cache.single_type_manager import SingleTypeKVCacheManager
from inferkit.kv_transfer.actions import Action, BlockIds, FirstToken, Ready
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey
from inferkit.scheduler.disagg import DisaggScheduler, Transfer, key_of, pinned_pair, remaining_ms


class PrefillTransfer(Transfer, Protocol):
    """`PrefillRecords` of this rank, and what moves the bytes."""

    def accept(
        self, key: TransferKey, pair: PinnedPair, *, remaining_ms: int
    ) -> Sequence[Action]: ...

    def refuse(self, key: TransferKey, decode: Peer, reason: str) -> Sequence[Action]: ...

    def begin(self, key: TransferKey) -> Sequence[Action] | None: ...

    def send_chunk(
        self, key: TransferKey, end_token: int, block_ids: BlockIds
    ) -> Sequence[Action]: ...

    def complete(
        self, key: TransferKey, first_token: FirstToken, block_ids: BlockIds
    ) -> Sequence[Action]: ...

    def finish(self, key: TransferKey, first_token: FirstToken) -> Sequence[Action]: ...


class PrefillDisaggScheduler(DisaggScheduler):
    """One token per request, and never a block taken away from one.

    bootstrap --Ready--> waiting --blocks--> running --first token--> inflight --End--> finished

    A request takes blocks only when every Handshake is here, and only if its whole prompt fits
    beside what running prompts will still take; so a prompt that has begun is computed to its
    end, and nothing is preempted. Requests whose decode side is slow wait in `bootstrap_queue`
    and `inflight_queue` and hold up nobody.

    The first token is told in the step that samples it. The request ends with `End`: with the
    reason of its output where the first token ends that, else with LENGTH, for its share is done.
    """

    transfer: PrefillTransfer

    def __init__(self, *, transfer: PrefillTransfer, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.transfer = transfer
        self.bootstrap_queue: dict[int, Request] = {}
        """Handshakes are missing; hold nothing."""
        self.inflight_queue: dict[int, Request] = {}
        """Computed; hold their blocks until decode has the KV."""

    @property
    def num_waiting(self) -> int:
        return len(self.bootstrap_queue) + len(self.waiting_queue)

    def _own_queues(self) -> Mapping[str, dict[int, Request]]:
        return {"bootstrap": self.bootstrap_queue, "inflight": self.inflight_queue}

    # -- requests in ---------------------------------------------------------------------------

    def _max_kv_len(self, request: Request) -> int:
        return request.num_prompt_tokens

    def _on_refused(self, request: Request) -> None:
        if request.handoff is not None:
            decode = pinned_pair(request).decode
            self._carry_out(self.transfer.refuse(key_of(request), decode, request.finish_detail))

    def _accept(self, request: Request) -> Sequence[Action]:
        actions = self.transfer.accept(
            key_of(request),
            pinned_pair(request),
            remaining_ms=remaining_ms(request),
        )
        self.bootstrap_queue[request.request_id] = request
        return actions

    def advance_queues(self) -> dict[int, list[int]]:
        self._carry_out(self.transfer.tick())
        return {}

    def _on_action(self, action: Action) -> None:
        assert isinstance(action, Ready), f"{action} is none of a prefill scheduler"
        request = self._live(action.key)
        if request is not None:
            del self.bootstrap_queue[request.request_id]
            self.waiting_queue.append(request)

    # -- blocks --------------------------------------------------------------------------------

    def _has_room(self, request: Request, num_growing: int) -> bool:
        """Also blocks that running prompts have not taken yet are theirs."""
        computing = [request, *self.running_requests.values()]
        return all(
            sum(_missing_blocks(manager, other) for other in computing) <= manager.pool.num_free
            for manager in self.kv_cache.managers.values()
        )

    def _on_admitted(self, request: Request) -> None:
        key = key_of(request)
        self._holders[key] = None
        self.transfer.begin(key)

    def _make_room(self, request: Request) -> bool:
        raise AssertionError(
            f"request {request.request_id}: blocks of its prompt were set aside and are not there"
        )

    # -- after the step ------------------------------------------------------------------------

    def process_output(
        self, batch: Batch, output: StepOutput
    ) -> tuple[dict[int, list[int]], list[Request]]:
        new_tokens, finished = super().process_output(batch, output)
        for row in batch.rows:
            self._send(row)
        return new_tokens, finished

    def _send(self, row: BatchRow) -> None:
        request, key = row.request, key_of(row.request)
        block_ids = self._block_ids(request)
        if not row.samples:
            num_computed = request.num_computed_tokens
            self._carry_out(self.transfer.send_chunk(key, num_computed, block_ids))
            return
        del self.running_requests[request.request_id]
        self.inflight_queue[request.request_id] = request
        logprobs = request.output_logprobs
        first_token = FirstToken(
            request.output_token_ids[0],
            kv_len=request.num_prompt_tokens,
            seed=request.seed,
            logprobs=logprobs[0] if logprobs else None,
        )
        if request.finish_reason is None:
            self._carry_out(self.transfer.complete(key, first_token, block_ids))
        else:
            self._carry_out(self.transfer.finish(key, first_token))

    def _is_done(self, request: Request) -> bool:
        """Only the transfer ends a request."""
        return False


def _missing_blocks(manager: SingleTypeKVCacheManager, request: Request) -> int:
    """Blocks that a prompt still takes."""
    need = manager.max_blocks_per_request(request.num_prompt_tokens)
    return max(0, need - manager.num_held_blocks(request.request_id))
