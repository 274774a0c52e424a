"""A router as the protocol describes it: attempts, legs, retries before the first byte."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inferkit.kv_transfer.actions import Code
from inferkit.kv_transfer.identity import PinnedPair, TransferKey, make_attempt
from tests.kv_transfer.sim_instance import Instance
from tests.kv_transfer.sim_requests import Generate, Ghost, Violation

if TYPE_CHECKING:
    from tests.kv_transfer.world import World


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
    attempt: TransferKey | None = None
    num_attempts: int = 0
    pair: tuple[Instance, Instance] | None = None
    byte_of: TransferKey | None = None
    router: "Router | None" = None
    outcome: str = ""
    history: list[str] = field(default_factory=list)


class Router:
    def __init__(self, world: "World", nonce: int) -> None:
        self.world = world
        self.nonce = nonce
        self.counter = 0
        self.is_lost = False
        self.active: dict[TransferKey, ClientRequest] = {}
        self.rooms: dict[int, ClientRequest] = {}

    def start(self, request: ClientRequest) -> None:
        if request.outcome or self.is_lost:
            return
        request.router = self
        if request.room in self.rooms:
            self._finish(request, "409")
            return
        request.started_s = self.world.loop.now_s
        self.rooms[request.room] = request
        self.world.loop.after(request.deadline_s, lambda: self.stop(request))
        self._dispatch(request)

    def stop(self, request: ClientRequest) -> None:
        """The deadline is over, or the client leaves."""
        if not request.outcome and not self.is_lost:
            self._finish(request, "stopped")

    def lose(self) -> None:
        """The host is gone: nobody sees a closed connection."""
        self.is_lost = True
        for request in list(self.active.values()):
            request.outcome = "lost"
            if request.pair is not None and request.attempt is not None:
                for instance in request.pair:
                    instance.legs.pop(request.attempt, None)
        self.active.clear()

    def _dispatch(self, request: ClientRequest) -> None:
        world = self.world
        self.counter += 1
        attempt = make_attempt(self.nonce, self.counter)
        if not world.plan.has_unique_attempts:
            attempt = make_attempt(self.nonce, request.num_attempts + 1)
        request.num_attempts += 1
        key = TransferKey(request.room, attempt)
        prefill = world.rng.choice(world.prefills)
        decode = world.rng.choice(world.decodes)
        request.attempt, request.pair = key, (prefill, decode)
        self.active[key] = request
        left_s = request.started_s + request.deadline_s - world.loop.now_s
        ghost = Ghost(
            **{
                **{name: getattr(request.ghost, name) for name in Ghost.__dataclass_fields__},
                "attempt": request.num_attempts,
            }
        )
        event = Generate(
            key,
            PinnedPair(world.known_peer(prefill), world.known_peer(decode)),
            ghost,
            remaining_ms=int(left_s * 1000),
        )
        for instance in (prefill, decode):
            delay_s = world.http_delay()
            world.loop.after(delay_s, lambda instance=instance: self._arrive(instance, event))

    def _arrive(self, instance: Instance, event: Generate) -> None:
        """A leg is posted; a cancel never overtakes it, for it closes the same connection."""
        if self.world.is_silent or self.is_lost:
            return
        instance.post(event, lambda key, code: self._reply(instance, key, code))
        if self.active.get(event.key) is None and self.world.plan.cancels_legs:
            # The close comes behind the request, at its own pace.
            delay_s = self.world.http_delay()
            self.world.loop.after(delay_s, lambda: self._close(instance, event.key))

    def _reply(self, instance: Instance, key: TransferKey, code: Code | None) -> None:
        if self.world.is_silent or self.is_lost:
            return
        delay_s = self.world.rng.random() * 0.02
        self.world.loop.after(delay_s, lambda: self._on_answer(instance, key, code))

    def _on_answer(self, instance: Instance, key: TransferKey, code: Code | None) -> None:
        """None = a first token from decode."""
        request = self.active.get(key)
        if request is None or self.is_lost or request.pair is None:
            return
        request.history.append(f"{instance.name}: {code}")
        is_decode = instance is request.pair[1]
        if code is None:
            if request.byte_of not in (None, key):
                raise Violation(f"request {request.idx} gets tokens of two attempts")
            request.byte_of = key
        elif code is Code.OK:
            if is_decode:
                self._finish(request, "ok")
        elif code is Code.REFUSED:
            self._finish(request, "400")
        elif request.byte_of is not None or request.tries_left == 0:
            self._finish(request, "error")
        else:
            request.tries_left -= 1
            self._cancel(request)
            self._dispatch(request)

    def _cancel(self, request: ClientRequest) -> None:
        assert request.attempt is not None and request.pair is not None
        self.active.pop(request.attempt, None)
        if self.world.plan.cancels_legs:
            for instance in request.pair:
                key = request.attempt
                self.world.loop.after(
                    self.world.http_delay(), lambda i=instance, key=key: self._close(i, key)
                )

    def _close(self, instance: Instance, key: TransferKey) -> None:
        if not self.world.is_silent and not self.is_lost:
            instance.close(key)

    def _finish(self, request: ClientRequest, outcome: str) -> None:
        if request.outcome:
            raise Violation(f"request {request.idx} ends twice: {request.outcome}, {outcome}")
        request.outcome = outcome
        if request.attempt is not None:
            self._cancel(request)
        if self.rooms.get(request.room) is request:
            del self.rooms[request.room]
