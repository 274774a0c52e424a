"""Sends each request to a pair of instances, and returns the outputs of both as one stream.

To the service above it, it is what `DPDispatcher` is inside one instance.
"""

import asyncio
import logging
import random
from collections.abc import Coroutine
from typing import Any

from inferkit.core.protocols import Clock
from inferkit.core.sampling_params import SamplingParams
from inferkit.kv_transfer.identity import Peer
from inferkit.online.errors import GenerationFailed, ServiceError, Unavailable
from inferkit.online.facts import InstanceFacts, Side
from inferkit.online.instance import Instance, draw_room
from inferkit.online.router.leg_client import LegClient
from inferkit.online.router.pairs import PairTable, Policy
from inferkit.online.router.poller import Poller
from inferkit.online.router.registry import Registry
from inferkit.online.router.route import AttemptNumbers, Route
from inferkit.online.router.routed_request import Choose, LegFailure, Report, RoutedRequest
from inferkit.online.router.stream import RoutedStream
from inferkit.online.router_signature import RouterSignatures
from inferkit.online.work import Work

logger = logging.getLogger(__name__)

CONFLICT_DELAY_S = (0.01, 0.1)
"""Two routers that have met in a room should not meet again."""
PROBE_TOKENS = 2
"""A single token comes from prefill alone; the second one needs the hand-off."""
PROBE_LIMIT_S = 600.0
"""The first generation may compile."""
PROBE_ID = "probe"


class PairDispatcher:
    """Args:
    instance: this router.
    retries: further attempts of a request before its first token.
    first_token: the leg whose first token the client gets.
    """

    def __init__(
        self,
        *,
        instance: Instance,
        registry: Registry,
        clock: Clock,
        policy: Policy = Policy.HASH,
        retries: int = 1,
        first_token: Side = Side.DECODE,
        signatures: RouterSignatures | None = None,
    ) -> None:
        self.instance = instance
        self.registry = registry
        self.clock = clock
        self.retries = retries
        self.first_token = first_token
        self.pairs = PairTable(registry=registry, policy=policy, clock=clock)
        self.legs = LegClient(clock=clock, signatures=signatures)
        self.failure: ServiceError | None = None
        """Why no request can be served any more."""
        self.changed = asyncio.Event()
        """Set whenever it may take requests now that did not."""
        self.num_retries = 0
        self.num_ignored_outputs = 0
        self.poller = Poller(registry=registry, on_change=self.on_change, spawn=self._spawn)
        self._attempts = AttemptNumbers()
        self._streams: set[RoutedStream] = set()
        self._probe_streams: dict[RoutedStream, Route] = {}
        self._wake = asyncio.Event()
        self._proving: asyncio.Task[None] | None = None
        self._probes: set[asyncio.Task[None]] = set()

    # -- start and end -------------------------------------------------------------------------

    def start(self) -> None:
        self._proving = self._spawn(self._prove())
        self.poller.start()

    async def close(self) -> None:
        """Undo `start`; what still runs fails."""
        self.fail(Unavailable("the router has ended"))
        await self.poller.close()
        tasks = [task for task in (self._proving, *self._probes) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.legs.close()

    def fail(self, error: ServiceError) -> None:
        """End all generations with this error, and refuse new ones."""
        if self.failure is None:
            self.failure = error
        for stream in [*self._streams, *self._probe_streams]:
            stream.fail(error)
        self.changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task without which the router is of no use."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the router failed", exc_info=error)
            self.fail(GenerationFailed(f"the router failed: {error}"))

    # -- requests ------------------------------------------------------------------------------

    def submit(self, work: Work) -> RoutedStream:
        """Send a generation on its way.

        Raises:
            Unavailable: no pair takes requests; says what is missing.
        """
        missing = self.missing()
        if missing:
            raise Unavailable("; ".join(missing))
        stream = self._make(work, self.pairs.choose, 1 + self.retries)
        self._streams.add(stream)
        stream.start()
        return stream

    def _make(self, work: Work, choose: Choose, max_attempts: int) -> RoutedStream:
        request = RoutedRequest(
            header=self.instance.header,
            room=work.room,
            is_room_given=work.is_room_given,
            max_attempts=max_attempts,
            choose=choose,
            next_attempt=self._attempts.next,
            first_token=self.first_token,
            conflict_delay_s=lambda: random.uniform(*CONFLICT_DELAY_S),
            nobody=lambda: "; ".join(self.missing()),
        )
        return RoutedStream(work, request=request, router=self)

    def forget(self, stream: RoutedStream) -> None:
        """Called by a stream that is over."""
        self._streams.discard(stream)
        self._probe_streams.pop(stream, None)
        self.num_ignored_outputs += stream.request.num_ignored

    # -- what is known of the instances ----------------------------------------------------------

    def missing(self) -> list[str]:
        """Why no request can be served; empty = requests are taken."""
        if self.failure is not None:
            return [str(self.failure)]
        return self.pairs.missing()

    async def until_changed(self) -> None:
        """Wait until a pair has been proven or the router fails."""
        await self.changed.wait()
        self.changed.clear()

    @property
    def num_running(self) -> int:
        return len(self._streams)

    def stats(self) -> dict[str, Any]:
        """Plain JSON data."""
        outstanding = self.pairs.outstanding
        instances = [
            {
                **entry,
                "outstanding_tokens": outstanding[Peer(entry["instance_id"], int(entry["epoch"]))]
                if entry["epoch"]
                else 0,
            }
            for entry in self.registry.stats()
        ]
        return {
            "instances": instances,
            "pairs": self.pairs.stats(),
            "retries": self.num_retries,
            "ignored_outputs": self.num_ignored_outputs,
        }

    def join(self, facts: InstanceFacts) -> None:
        """An instance says that it is there.

        Raises:
            ValueError: this router cannot use it.
        """
        self.on_change(self.registry.join(facts))
        if not self.registry.is_usable(facts.url):
            self.poller.wake(facts.url)

    def leave(self, instance_id: str) -> bool:
        """An instance takes no new request; False = it is not known."""
        is_known = self.registry.leave(instance_id)
        self.on_change([])
        return is_known

    def on_change(self, gone: list[Peer]) -> None:
        """The registry may have changed."""
        self.poller.follow()
        self.pairs.refresh()
        self.legs.prune()
        if gone:
            lost = set(gone)
            for stream in list(self._streams):
                stream.lose(lambda facts: facts.peer in lost)
        for stream, route in list(self._probe_streams.items()):
            if not self.pairs.has(route):
                # An instance that drains need not wait for the end of a probe.
                stream.fail(Unavailable("an instance of the pair has gone"))
        self._wake.set()

    def on_leg_failed(self, instance: InstanceFacts, failure: LegFailure) -> None:
        """Called by a stream: the instance may have gone, or changed."""
        self.poller.wake(instance.url)

    def report(self, report: Report) -> None:
        """Called by a stream: what its attempt says of the pair."""
        self.pairs.report(report.route, report.failed)
        if report.failed is not None:
            self._wake.set()

    # -- probes --------------------------------------------------------------------------------

    async def _prove(self) -> None:
        """Generate through every pair that is new or was open, before clients do."""
        while True:
            self._wake.clear()
            for route in self.pairs.probes_due():
                task = self._spawn(self._probe(route))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)
            due_s = self.pairs.next_probe_s()
            try:
                async with asyncio.timeout(None if due_s is None else due_s - self.clock()):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _probe(self, route: Route) -> None:
        work = Work(
            token_ids=[0],
            sampling=SamplingParams(temperature=0.0, max_tokens=PROBE_TOKENS, ignore_eos=True),
            seed=0,
            room=draw_room(),
            request_id=PROBE_ID,
            remaining_s=PROBE_LIMIT_S,
        )
        error = "the probe was given up"
        try:
            stream = self._make(work, lambda room, attempt, failed: route, 1)
            self._probe_streams[stream] = route
            stream.start()
            num_tokens = sum([len(output.token_ids) async for output in stream])
            error = "" if num_tokens else "no token has come back"
        except ServiceError as failure:
            error = str(failure)
        finally:
            self.pairs.end_probe(route, error)
        if error:
            logger.warning("%s and %s: %s", route.prefill.url, route.decode.url, error)
        self.changed.set()
        self._wake.set()
