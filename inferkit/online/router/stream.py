"""A routed request while it runs: carries out what its state machine says, with one task per leg.

To whom consumes it, it is what `OutputStream` is for requests of one instance.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from inferkit.core.messages import Generate, Output
from inferkit.kv_transfer.identity import Peer
from inferkit.online.errors import GenerationFailed, ServiceError
from inferkit.online.facts import InstanceFacts, Side
from inferkit.online.request_table import Key
from inferkit.online.router.leg_client import LegFailed
from inferkit.online.router.routed_request import (
    Action,
    CloseLegs,
    Deliver,
    Fault,
    Finish,
    LegFailure,
    OpenLegs,
    Report,
    RoutedRequest,
    RouteState,
)
from inferkit.online.work import Work

if TYPE_CHECKING:
    from inferkit.online.router.dispatcher import PairDispatcher

logger = logging.getLogger(__name__)

HEARD_INTERVAL_S = 1.0
"""A leg that gives tokens is a sign of life; so often is enough."""


class RoutedStream:
    """Outputs of one generation in order; ends with the one that has a finish reason.

    Raises from the iteration:
        ServiceError: the generation cannot go on.
    """

    def __init__(self, work: Work, *, request: RoutedRequest, router: "PairDispatcher") -> None:
        self.work = work
        self.request = request
        self.is_over = False
        self._router = router
        self._deadline_s = router.clock() + work.remaining_s if work.remaining_s else None
        self._timer: asyncio.TimerHandle | None = None
        self._arrived: asyncio.Queue[Output | ServiceError] = asyncio.Queue()
        self._legs: dict[tuple[int, Side], _Leg] = {}

    @property
    def key(self) -> Key:
        return self.work.room, self.request.attempt

    def __aiter__(self) -> "RoutedStream":
        return self

    async def __anext__(self) -> Output:
        if self.is_over and self._arrived.empty():
            raise StopAsyncIteration
        item = await self._arrived.get()
        if isinstance(item, ServiceError):
            raise item
        return item

    def start(self) -> None:
        """Called by the router."""
        if self._deadline_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(
                self.work.remaining_s, lambda: self._do(self.request.expire())
            )
        self._do(self.request.start())

    def abort(self, reason: str) -> None:
        """End it now; the last output has the finish reason `abort`."""
        self._do(self.request.abort(reason))

    def cancel(self, reason: str) -> None:
        """The same for who does not want to hear of it any more."""
        self._do(self.request.cancel())

    def fail(self, error: ServiceError) -> None:
        self._do(self.request.fail(error))

    def lose(self, is_lost: Callable[[InstanceFacts], bool]) -> None:
        """Give up the legs at instances that are gone; their connections may not know it yet."""
        failure = LegFailure(Fault.AWAY, "it is gone, or has been restarted")
        for (attempt, side), leg in list(self._legs.items()):
            if is_lost(leg.instance):
                leg.task.cancel()
                self._do(self.request.on_leg_failed(attempt, side, failure))

    # -- actions -------------------------------------------------------------------------------

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, OpenLegs):
                self._open(action)
            elif isinstance(action, CloseLegs):
                for side in action.sides:
                    leg = self._legs.pop((action.attempt, side), None)
                    if leg is not None:
                        leg.close()
            elif isinstance(action, Deliver):
                self._deliver(action.output)
            elif isinstance(action, Report):
                self._router.report(action)
            elif isinstance(action, Finish):
                self._finish(action.error)

    def _open(self, action: OpenLegs) -> None:
        route = action.route
        if self.request.num_attempts > 1:
            self._router.num_retries += 1
            logger.warning(
                "room=%d is tried again, attempt=%d, after: %s",
                self.work.room,
                action.attempt,
                self.request.failed[-1],
            )
        num_output = self.work.sampling.max_tokens or 0
        costs = {Side.PREFILL: len(self.work.token_ids), Side.DECODE: num_output}
        for side in Side:
            instance = route.side(side)
            leg = _Leg(instance, costs[side], self._router.pairs.outstanding)
            self._legs[action.attempt, side] = leg
            message = self._message(action, instance)
            leg.task = asyncio.create_task(self._run(leg, side, message, action.delay_s))
            leg.task.add_done_callback(self._on_task_end)

    def _message(self, action: OpenLegs, instance: InstanceFacts) -> Generate:
        work = self.work
        left_ms = 0
        if self._deadline_s is not None:
            left_s = self._deadline_s - self._router.clock() - action.delay_s
            left_ms = max(1, int(left_s * 1000))
        return Generate(
            instance_id=self._router.instance.instance_id,
            epoch=self._router.instance.epoch,
            peer_epoch=instance.epoch,
            room=work.room,
            attempt=action.attempt,
            remaining_ms=left_ms,
            request_id=work.request_id,
            token_ids=work.token_ids,
            sampling=work.sampling,
            seed=work.seed,
            sample_index=work.sample_index,
            pair=action.route.pair,
        )

    def _deliver(self, output: Output) -> None:
        self._arrived.put_nowait(output)
        num_left = (self.work.sampling.max_tokens or 0) - self.request.num_tokens
        for (_, side), leg in self._legs.items():
            leg.hold(max(0, num_left) if side is Side.DECODE else 0)

    def _finish(self, error: ServiceError | None) -> None:
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if error is not None:
            self._arrived.put_nowait(error)
        self._router.forget(self)

    # -- legs ----------------------------------------------------------------------------------

    async def _run(self, leg: "_Leg", side: Side, message: Generate, delay_s: float) -> None:
        attempt = message.attempt
        try:
            if delay_s:
                await asyncio.sleep(delay_s)
            outputs = self._router.legs.outputs(leg.instance, message)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    self._hear(leg)
                    self._do(self.request.on_output(attempt, side, output))
        except LegFailed as error:
            self._router.on_leg_failed(leg.instance, error.failure)
            self._do(self.request.on_leg_failed(attempt, side, error.failure))
        finally:
            leg.hold(0)
            if self._legs.get((attempt, side)) is leg:
                del self._legs[attempt, side]

    def _hear(self, leg: "_Leg") -> None:
        now_s = self._router.clock()
        if now_s - leg.heard_s > HEARD_INTERVAL_S:
            leg.heard_s = now_s
            self._router.registry.heard(leg.instance.peer)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a leg failed", exc_info=error)
            if self.request.state is not RouteState.END:
                self.fail(GenerationFailed("internal error; see the log of the router"))


class _Leg:
    """An open leg, and the tokens that it makes its instance owe."""

    task: asyncio.Task[None]

    def __init__(
        self, instance: InstanceFacts, num_tokens: int, outstanding: Counter[Peer]
    ) -> None:
        self.instance = instance
        self.heard_s = float("-inf")
        self._outstanding = outstanding
        self._num_tokens = 0
        self.hold(num_tokens)

    def hold(self, num_tokens: int) -> None:
        self._outstanding[self.instance.peer] += num_tokens - self._num_tokens
        self._num_tokens = num_tokens

    def close(self) -> None:
        self.hold(0)
        self.task.cancel()
