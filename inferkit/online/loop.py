"""The loop of every rank: told, agreed, one step, tell. No branch on the role."""

import logging
from collections.abc import Mapping

import torch

from inferkit.core.batch import dummy_batch
from inferkit.core.errors import RequestError
from inferkit.core.messages import Abort, Generate, Stop, ToWorker
from inferkit.core.protocols import Engine
from inferkit.core.request import FinishReason, Request
from inferkit.online.output_sender import Outbox
from inferkit.online.request_feed import RequestFeed
from inferkit.online.request_table import Key, RequestTable
from inferkit.parallel.communicator import Communicator
from inferkit.scheduler.scheduler import Scheduler, StepResult

logger = logging.getLogger(__name__)

IDLE_WAIT_MS = 100
"""A request that comes ends the wait at once; this is how often an idle loop ticks."""
LOCK_STEP_WAIT_MS = 3
"""Where DP ranks go in step, one that waits for its own requests delays those of the others."""
BLOCKED_WAIT_MS = 1
"""Requests wait for blocks that a transfer holds; nothing can be computed meanwhile."""
PEER_WAIT_MS = 2
"""A hand-off is under way: what other instances do is seen within so long."""


class OnlineLoop:
    """Ticks until it is told to stop.

    Args:
        scheduler: any that has the interface of `Scheduler`.
        dp_group: of ranks that compute together, one of each DP rank, so that all must step when
            one does; None where every DP rank goes on its own.
    """

    def __init__(
        self,
        *,
        feed: RequestFeed,
        requests: RequestTable,
        scheduler: Scheduler,
        engine: Engine,
        outbox: Outbox,
        dp_group: Communicator | None = None,
    ) -> None:
        self.feed = feed
        self.requests = requests
        self.scheduler = scheduler
        self.engine = engine
        self.outbox = outbox
        self.dp_group = dp_group
        self.is_over = False
        self.num_ticks = 0
        self._is_told_to_stop = False
        self._wait_ms = 0
        self._refused: dict[Key, Request] = {}

    def run(self) -> None:
        while not self.is_over:
            self.tick()

    def tick(self) -> None:
        """Every rank of the instance ticks alike; those of one DP rank get the same messages."""
        for message in self.feed.receive(self._wait_ms):
            self._take(message)
        arrived = self.scheduler.advance_queues()
        if arrived:
            self._tell(arrived)  # a first token from prefill does not wait for a step of decode
        is_busy = self._agree()
        result = self.scheduler.run_step(self.engine) if self.scheduler.has_work else None
        if is_busy and result is None and self.dp_group is not None:
            # Other DP ranks enter collectives: a missing rank dead-locks them.
            self.engine.forward_batch(dummy_batch(num_computed_tokens=1))
        self._tell(result.new_tokens if result is not None else {})
        self._wait_ms = self._next_wait_ms(is_busy, result)
        self.num_ticks += 1

    def _take(self, message: ToWorker) -> None:
        if isinstance(message, Generate):
            self._add(message)
        elif isinstance(message, Abort):
            request_id = self.requests.id_of(message.key)
            if request_id is not None:
                logger.debug("request=%d aborted: %s", request_id, message.reason)
                self.scheduler.abort(request_id)
        elif isinstance(message, Stop):
            self._is_told_to_stop = True

    def _add(self, message: Generate) -> None:
        """Hand a request to the scheduler. One that is wrong is answered, the others go on."""
        try:
            request = self.requests.add(message)
            if request is None:
                logger.warning("room=%d attempt=%d came twice", message.room, message.attempt)
                return
            logger.debug(
                "request=%d is room=%d attempt=%d id=%s",
                request.request_id,
                message.room,
                message.attempt,
                message.request_id,
            )
            self.scheduler.add_request(request)
        except RequestError as error:
            request_id = self.requests.id_of(message.key)
            if request_id is not None:
                self.requests.remove(request_id)
            self._refused[message.key] = _refused(message, str(error))

    def _agree(self) -> bool:
        """Whether this rank must step: it has work, or one that it computes together with has.

        All of these ranks leave the loop in the same tick.
        """
        has_work, stays = self.scheduler.has_work, not self._is_told_to_stop
        if self.dp_group is not None:
            votes = torch.tensor([has_work, stays], dtype=torch.int64)
            has_work, stays = map(bool, self.dp_group.all_reduce(votes, "max").tolist())
        self.is_over = not stays
        return has_work and stays

    def _tell(self, new_tokens: Mapping[int, list[int]]) -> None:
        """Tokens that have come since the last call, and the requests that are over."""
        told = {
            self.requests.key_of(request_id): (self.scheduler.request(request_id), len(tokens))
            for request_id, tokens in new_tokens.items()
        }
        finished = self._refused
        self._refused = {}
        for request in list(self.scheduler.finished_requests.values()):
            self.scheduler.forget(request.request_id)
            finished[self.requests.remove(request.request_id)] = request
        for key in finished:
            self.feed.forget(key)
        kv_cache = self.scheduler.kv_cache
        state = {
            "num_ticks": self.num_ticks,
            "num_steps": self.scheduler.num_steps,
            "num_waiting": self.scheduler.num_waiting,
            "num_running": len(self.scheduler.running_requests),
            "kv_used": kv_cache.num_used_blocks,
            "kv_total": kv_cache.num_usable_blocks,
            "num_dropped": self.feed.num_dropped,
            "hand_off": self.scheduler.hand_off_stats(),
        }
        self.outbox.send(told, finished, state)

    def _next_wait_ms(self, is_busy: bool, result: StepResult | None) -> int:
        if not is_busy:
            if self.scheduler.has_handoffs:
                return PEER_WAIT_MS
            return IDLE_WAIT_MS if self.dp_group is None else LOCK_STEP_WAIT_MS
        return 0 if result is not None or self.dp_group is not None else BLOCKED_WAIT_MS


def _refused(message: Generate, detail: str) -> Request:
    request = Request(
        request_id=0,
        prompt_token_ids=message.token_ids,
        sampling=message.sampling,
        seed=message.seed,
    )
    request.finish_reason, request.finish_detail = FinishReason.REFUSED, detail
    return request
