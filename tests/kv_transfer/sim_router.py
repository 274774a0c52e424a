"""A router as the protocol describes it: attempts, legs, retries before the first byte."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    token_ids: list[int] = field(default_factory=list)
    """What the client has got."""
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
        self.arrives: dict[object, float] = {}
        """When the last piece of a connection arrives."""

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
        ghost = replace(request.ghost, attempt=request.num_attempts)
        request.ghost = ghost
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
        instance.post(event, lambda *answer: self._reply(instance, *answer))
        if self.active.get(event.key) is None and self.world.plan.cancels_legs:
            # The close comes behind the request, at its own pace.
            delay_s = self.world.http_delay()
            self.world.loop.after(delay_s, lambda: self._close(instance, event.key))

    def _reply(
        self, instance: Instance, key: TransferKey, code: Code | None, token_ids: Sequence[int]
    ) -> None:
        if self.world.is_silent or self.is_lost:
            return
        # One connection: what is sent first arrives first.
        link = (instance.name, key)
        at_s = self.world.loop.now_s + self.world.rng.random() * 0.02
        at_s = self.arrives[link] = max(at_s, self.arrives.get(link, 0.0) + 1e-9)
        self.world.loop.after(
            at_s - self.world.loop.now_s,
            lambda: self._on_answer(instance, key, code, token_ids),
        )

    def _on_answer(
        self, instance: Instance, key: TransferKey, code: Code | None, token_ids: Sequence[int]
    ) -> None:
        """None = the leg goes on; the client is given what decode says."""
        request = self.active.get(key)
        if request is None or self.is_lost or request.pair is None:
            return
        is_decode = instance is request.pair[1]
        if code is None:
            self._check_tokens(request, key, token_ids, is_decode=is_decode)
            return
        request.history.append(f"{instance.name}: {code}")
        if code is Code.OK:
            if is_decode:
                if request.token_ids != request.ghost.answer:
                    raise Violation(f"{request.ghost} ends after {request.token_ids}")
                self._finish(request, "ok")
        elif code is Code.REFUSED:
            self._finish(request, "400")
        elif request.byte_of is not None or request.tries_left == 0:
            self._finish(request, "error")
        else:
            request.tries_left -= 1
            self._cancel(request)
            self._dispatch(request)

    @staticmethod
    def _check_tokens(
        request: ClientRequest, key: TransferKey, token_ids: Sequence[int], *, is_decode: bool
    ) -> None:
        answer = request.ghost.answer
        if not is_decode:
            if list(token_ids) != answer[:1]:
                raise Violation(f"prefill says {token_ids} to {request.ghost}")
            return
        if request.byte_of not in (None, key):
            raise Violation(f"request {request.idx} gets tokens of two attempts")
        request.byte_of = key
        request.token_ids += token_ids
        if request.token_ids != answer[: len(request.token_ids)]:
            raise Violation(f"{request.ghost} gets {request.token_ids}, which is not its text")

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
