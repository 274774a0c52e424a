"""A router: the real state machine of a request, the real table of pairs and breakers, and the real
registry of instances. Only HTTP is simulated; a probe of a pair succeeds without being sent."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from inferkit.core.messages import Output
from inferkit.core.request import FinishReason
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey, make_attempt
from inferkit.online.errors import BadRequest, RoomInUse, ServiceError, TimeOver
from inferkit.online.facts import Side
from inferkit.online.router.pairs import PairTable, Policy
from inferkit.online.router.registry import Registry
from inferkit.online.router.route import AttemptNumbers, Route
from inferkit.online.router.routed_request import (
    Action,
    Choose,
    CloseLegs,
    Deliver,
    Failed,
    Fault,
    Finish,
    LegFailure,
    OpenLegs,
    Report,
    RoutedRequest,
)
from tests.kv_transfer.sim_instance import Instance
from tests.kv_transfer.sim_requests import Generate, Ghost, Violation

if TYPE_CHECKING:
    from tests.kv_transfer.world import World

POLL_S = 1.0
OUTCOMES: Mapping[type[ServiceError], str] = {
    BadRequest: "400",
    RoomInUse: "409",
    TimeOver: "stopped",
}


@dataclass(eq=False)
class ClientRequest:
    """One request of one client."""

    idx: int
    room: int
    deadline_s: float
    ghost: Ghost
    tries_left: int
    starts_at: float | None = None
    started_s: float = 0.0
    routed: RoutedRequest | None = None
    router: "Router | None" = None
    ghosts: dict[int, Ghost] = field(default_factory=dict)
    """Attempt -> what it really is."""
    token_ids: list[int] = field(default_factory=list)
    """What the client has got."""
    finish_reason: FinishReason | None = None
    outcome: str = ""
    history: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Leg:
    """A connection to an instance, which is one half of an attempt."""

    request: ClientRequest
    side: Side
    instance: Instance
    peer: Peer
    event: Generate
    is_closed: bool = False
    is_posted: bool = False
    arrives: float = 0.0
    """When the last piece arrives: what is sent first arrives first."""


class Router:
    def __init__(self, world: "World", nonce: int) -> None:
        self.world = world
        self.nonce = nonce
        self.is_lost = False
        self.numbers = AttemptNumbers()
        self.numbers._nonce = nonce  # a schedule is the same in every process
        self.registry = Registry(
            prefill_urls=[instance.url for instance in world.prefills],
            decode_urls=[instance.url for instance in world.decodes],
            clock=world.loop.clock,
        )
        policy = world.rng.choice(list(Policy))
        self.pairs = PairTable(registry=self.registry, policy=policy, clock=world.loop.clock)
        self.rooms: dict[int, ClientRequest] = {}
        self.legs: dict[tuple[int, Side], Leg] = {}
        self._poll()

    # -- instances -----------------------------------------------------------------------------

    def _poll(self) -> None:
        """Ask every instance what it is, and prove pairs that need it."""
        if self.is_lost:
            return
        for instance in self.world.instances.values():
            delay_s = self.world.http_delay()
            self.world.loop.after(delay_s, lambda instance=instance: self._asked(instance))
        interval_s = POLL_S * (5.0 if self.world.is_silent else 1.0)
        self.world.loop.after(interval_s, self._poll)

    def _asked(self, instance: Instance) -> None:
        gone: list[Peer] = []
        if self.world.is_silent:
            self.registry.missed(instance.url, "no answer", is_definite=False)
        elif instance.is_up:
            gone = self.registry.answered(instance.url, instance.facts)
        else:
            self.registry.missed(instance.url, "refused", is_definite=True)
        gone += self.registry.sweep()
        self.pairs.refresh()
        for route in self.pairs.probes_due():
            self.pairs.end_probe(route, "")
        failure = LegFailure(Fault.AWAY, "it is gone")
        for (attempt, side), leg in list(self.legs.items()):
            if leg.peer in gone and not leg.is_closed and leg.request.routed is not None:
                self._do(leg.request, leg.request.routed.on_leg_failed(attempt, side, failure))

    # -- clients -------------------------------------------------------------------------------

    def start(self, request: ClientRequest, choose: Choose | None = None) -> None:
        if request.outcome or self.is_lost:
            return
        request.router = self
        if request.room in self.rooms:
            request.outcome = "409"
            return
        request.started_s = self.world.loop.now_s
        self.rooms[request.room] = request
        self.world.loop.after(request.deadline_s, lambda: self.expire(request))
        routed = request.routed = self.world.routed_class(
            header={"instance_id": "router", "epoch": self.nonce, "peer_epoch": 0},
            room=request.room,
            max_attempts=1 + request.tries_left,
            choose=choose or self.pairs.choose,
            next_attempt=self._next_attempt(request),
            first_token=self.world.plan.first_token,
            conflict_delay_s=lambda: self.world.rng.uniform(0.01, 0.1),
        )
        self._do(request, routed.start())

    def _next_attempt(self, request: ClientRequest) -> Callable[[], int]:
        if self.world.plan.has_unique_attempts:
            return self.numbers.next
        return lambda: make_attempt(self.nonce, len(request.ghosts) + 1)

    def stop(self, request: ClientRequest) -> None:
        """The client leaves."""
        if request.routed is not None and not request.outcome and not self.is_lost:
            self._do(request, request.routed.cancel())

    def expire(self, request: ClientRequest) -> None:
        if request.routed is not None and not request.outcome and not self.is_lost:
            self._do(request, request.routed.expire())

    def lose(self) -> None:
        """The host is gone: nobody sees a closed connection."""
        self.is_lost = True
        for request in self.rooms.values():
            request.outcome = "lost"
        for leg in self.legs.values():
            leg.instance.legs.pop(leg.event.key, None)
        self.legs.clear()

    # -- actions -------------------------------------------------------------------------------

    def _do(self, request: ClientRequest, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, OpenLegs):
                self._open(request, action)
            elif isinstance(action, CloseLegs):
                for side in action.sides:
                    self._close(self.legs[action.attempt, side])
            elif isinstance(action, Deliver):
                self._deliver(request, action.output)
            elif isinstance(action, Report):
                self.pairs.report(action.route, action.failed)
                request.history.append(str(action.failed or "runs"))
            elif isinstance(action, Finish):
                self._finish(request, action.error)

    def _open(self, request: ClientRequest, action: OpenLegs) -> None:
        ghost = replace(request.ghost, attempt=len(request.ghosts) + 1)
        request.ghost = request.ghosts[action.attempt] = ghost
        now_s = self.world.loop.now_s
        left_s = request.started_s + request.deadline_s - now_s - action.delay_s
        route = action.route
        event = Generate(
            TransferKey(request.room, action.attempt),
            PinnedPair(route.prefill.peer, route.decode.peer),
            ghost,
            remaining_ms=max(1, int(left_s * 1000)),
        )
        for side in Side:
            facts = route.side(side)
            instance = self.world.instances[facts.instance_id]
            leg = Leg(request, side, instance, facts.peer, event)
            self.legs[action.attempt, side] = leg
            self.world.loop.after(
                action.delay_s + self.world.http_delay(), lambda leg=leg: self._post(leg)
            )

    def _post(self, leg: Leg) -> None:
        """A leg arrives; a cancel never overtakes it, for it closes the same connection."""
        if self.world.is_silent or self.is_lost:
            return
        leg.is_posted = True
        leg.instance.post(leg.event, leg.peer, lambda answer: self._reply(leg, answer))
        if leg.is_closed:
            self._close_later(leg)

    def _close(self, leg: Leg) -> None:
        leg.is_closed = True
        if leg.is_posted:
            self._close_later(leg)

    def _close_later(self, leg: Leg) -> None:
        def close() -> None:
            if not self.world.is_silent and not self.is_lost:
                leg.instance.close(leg.event.key)

        if self.world.plan.cancels_legs:
            self.world.loop.after(self.world.http_delay(), close)

    def _reply(self, leg: Leg, answer: Output | LegFailure) -> None:
        if self.world.is_silent or self.is_lost:
            return
        now_s = self.world.loop.now_s
        leg.arrives = max(now_s + self.world.http_delay(), leg.arrives + 1e-9)
        self.world.loop.after(leg.arrives - now_s, lambda: self._heard(leg, answer))

    def _heard(self, leg: Leg, answer: Output | LegFailure) -> None:
        """Also of a leg that is closed: its answer may have been under way."""
        routed, attempt = leg.request.routed, leg.event.key.attempt
        if self.is_lost or routed is None:
            return
        if isinstance(answer, LegFailure):
            actions = routed.on_leg_failed(attempt, leg.side, answer)
        else:
            self.registry.heard(leg.peer)
            actions = routed.on_output(attempt, leg.side, answer)
        self._do(leg.request, actions)

    def _deliver(self, request: ClientRequest, output: Output) -> None:
        routed = request.routed
        if routed is None or output.attempt != routed.attempt:
            raise Violation(f"request {request.idx} gets what an old attempt says")
        request.token_ids += output.token_ids
        request.finish_reason = output.finish_reason
        answer = request.ghosts[output.attempt].answer
        if request.token_ids != answer[: len(request.token_ids)]:
            ghost = request.ghosts[output.attempt]
            raise Violation(f"{ghost} gets {request.token_ids}, which is not its text {answer}")

    def _finish(self, request: ClientRequest, error: ServiceError | None) -> None:
        if request.outcome:
            raise Violation(f"request {request.idx} ends twice: {request.outcome}, {error}")
        if error is not None:
            request.outcome = OUTCOMES.get(type(error), "error")
            request.history.append(str(error))
        elif request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            request.outcome = "ok"
            if request.token_ids != request.ghost.answer:
                raise Violation(f"{request.ghost} ends after {request.token_ids}")
        else:
            request.outcome = "stopped"
        if self.rooms.get(request.room) is request:
            del self.rooms[request.room]


def only(pair: Route) -> Choose:
    """A request that goes to one pair and no other."""

    def choose(room: int, attempt: int, failed: Sequence[Failed]) -> Route:
        return pair

    return choose
