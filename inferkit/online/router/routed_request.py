"""One request at the router as a state machine: events in, actions out.

Knows no socket, no task and no clock. Protocol section 3, table "Router, per request".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from msgspec.structs import replace

from inferkit.core.messages import Output
from inferkit.core.request import FinishReason
from inferkit.online.errors import (
    BadRequest,
    GenerationFailed,
    RoomInUse,
    ServiceError,
    TimeOver,
    Unavailable,
)
from inferkit.online.facts import Side
from inferkit.online.router.route import Route


class RouteState(StrEnum):
    """new -> attempt (again and again) -> streaming -> end; every state may end."""

    NEW = "new"
    ATTEMPT = "attempt"
    STREAMING = "streaming"
    """The client has a token; there is no other attempt from here on."""
    END = "end"


class Fault(StrEnum):
    REFUSED = "refused"
    """The request is wrong wherever it goes: 400."""
    CONFLICT = "conflict"
    """The instance runs another request of this room, or has not yet ended it."""
    AWAY = "away"
    """The instance drains, has restarted or does not know its partner; nothing is broken."""
    UNAVAILABLE = "unavailable"
    """It cannot do it now."""
    BROKEN = "broken"
    """The connection, or what came over it."""


@dataclass(frozen=True)
class LegFailure:
    """Why a leg ended without the end of its request."""

    fault: Fault
    detail: str

    @property
    def counts(self) -> bool:
        """Whether it speaks against the pair. What a client does wrong must never."""
        return self.fault in (Fault.UNAVAILABLE, Fault.BROKEN)


@dataclass(frozen=True)
class Failed:
    """An attempt that came to nothing."""

    route: Route
    side: Side
    failure: LegFailure

    def __str__(self) -> str:
        instance = self.route.side(self.side)
        where = f"{self.side} instance {instance.instance_id} at {instance.url}"
        return f"{where}: {self.failure.detail}"


@dataclass(frozen=True)
class OpenLegs:
    """Send both halves on their way."""

    attempt: int
    route: Route
    delay_s: float = 0.0


@dataclass(frozen=True)
class CloseLegs:
    """Close these connections now; their instances free what they hold."""

    attempt: int
    sides: frozenset[Side]


@dataclass(frozen=True)
class Deliver:
    output: Output


@dataclass(frozen=True)
class Report:
    """What an attempt says of its pair."""

    route: Route
    failed: Failed | None = None


@dataclass(frozen=True)
class Finish:
    """Nothing comes after it."""

    error: ServiceError | None = None


Action: TypeAlias = OpenLegs | CloseLegs | Deliver | Report | Finish
Choose: TypeAlias = Callable[[int, int, Sequence[Failed]], Route | None]
"""(room, attempt, attempts that failed) -> the next pair; None = there is none."""

_FAULTS: Mapping[FinishReason, Fault] = {
    FinishReason.REFUSED: Fault.REFUSED,
    FinishReason.PROMPT_TOO_LONG: Fault.REFUSED,
    FinishReason.CONFLICT: Fault.CONFLICT,
    FinishReason.UNAVAILABLE: Fault.UNAVAILABLE,
    # Nobody here has asked for it: a leg that is closed is not heard any more.
    FinishReason.ABORT: Fault.UNAVAILABLE,
}


class RoutedRequest:
    """Every method that takes an event returns what is to be done, in order.

    Args:
        header: fields of the router's own messages.
        is_room_given: by the client, who then hears of a conflict.
        max_attempts: the first one and its retries.
        first_token: decode = tokens come from the decode leg only; prefill = the first one goes
            to the client as soon as the prefill leg has it.
        next_attempt: a number that no attempt of anyone has had.
        conflict_delay_s: how long to wait before an attempt that follows a conflict.
    """

    def __init__(
        self,
        *,
        header: Mapping[str, Any],
        room: int,
        is_room_given: bool = False,
        max_attempts: int,
        choose: Choose,
        next_attempt: Callable[[], int],
        first_token: Side = Side.DECODE,
        conflict_delay_s: Callable[[], float] = lambda: 0.0,
        nobody: Callable[[], str] = lambda: "no pair of instances can be used",
    ) -> None:
        self.header = header
        self.room = room
        self.is_room_given = is_room_given
        self.max_attempts = max_attempts
        self.choose = choose
        self.next_attempt = next_attempt
        self.first_token = first_token
        self.conflict_delay_s = conflict_delay_s
        self.nobody = nobody
        self.state = RouteState.NEW
        self.attempt = 0
        self.num_attempts = 0
        self.num_tokens = 0
        """That the client was given."""
        self.num_ignored = 0
        """Answers of legs that are not of the current attempt, or over."""
        self.failed: list[Failed] = []
        self._route: Route | None = None
        self._open: set[Side] = set()
        self._early: int | None = None
        """The first token, when it came from prefill."""
        self._is_running = False
        """Decode has given something: from here on it needs nobody else."""
        self._num_cached = 0

    # -- events --------------------------------------------------------------------------------

    def start(self) -> list[Action]:
        assert self.state is RouteState.NEW, "a request starts once"
        return self._try()

    def on_output(self, attempt: int, side: Side, output: Output) -> list[Action]:
        """A leg has said something; its end, if it has a finish reason."""
        if not self._is_heard(attempt, side):
            return []
        fault = None
        if output.finish_reason is not None:
            self._open.discard(side)
            fault = _FAULTS.get(output.finish_reason)
        if fault is not None:
            detail = output.finish_detail or f"it ended with {output.finish_reason}"
            return self._on_failure(side, LegFailure(fault, detail))
        return self._on_decode(output) if side is Side.DECODE else self._on_prefill(output)

    def on_leg_failed(self, attempt: int, side: Side, failure: LegFailure) -> list[Action]:
        """A leg was refused, or has broken off."""
        if not self._is_heard(attempt, side):
            return []
        self._open.discard(side)
        return self._on_failure(side, failure)

    def abort(self, reason: str) -> list[Action]:
        """The client gets what there is."""
        if self.state is RouteState.END:
            return []
        output = Output(
            **self.header,
            room=self.room,
            attempt=self.attempt,
            index=self.num_tokens,
            finish_reason=FinishReason.ABORT,
            finish_detail=reason[:256],
        )
        return [*self._end(), Deliver(output), Finish()]

    def cancel(self) -> list[Action]:
        """Nobody waits for it any more."""
        return [] if self.state is RouteState.END else [*self._end(), Finish()]

    def expire(self) -> list[Action]:
        return self.fail(TimeOver("the request has used up its time"))

    def fail(self, error: ServiceError) -> list[Action]:
        return [] if self.state is RouteState.END else [*self._end(), Finish(error)]

    # -- inside --------------------------------------------------------------------------------

    def _is_heard(self, attempt: int, side: Side) -> bool:
        is_heard = (
            self.state is not RouteState.END and attempt == self.attempt and side in self._open
        )
        self.num_ignored += not is_heard
        return is_heard

    def _try(self) -> list[Action]:
        attempt = self.next_attempt()
        route = self.choose(self.room, attempt, self.failed)
        if route is None:
            return self._give_up()
        self.state = RouteState.ATTEMPT
        self.attempt, self._route = attempt, route
        self.num_attempts += 1
        self._num_cached = 0
        self._open = {Side.PREFILL, Side.DECODE}
        is_after_conflict = bool(self.failed) and self.failed[-1].failure.fault is Fault.CONFLICT
        return [OpenLegs(attempt, route, self.conflict_delay_s() if is_after_conflict else 0.0)]

    def _on_prefill(self, output: Output) -> list[Action]:
        self._num_cached = max(self._num_cached, output.num_cached_tokens)
        is_wanted = self.first_token is Side.PREFILL and self.state is RouteState.ATTEMPT
        if not is_wanted or not output.token_ids or output.index:
            return []
        self._early = output.token_ids[0]
        return self._deliver(
            replace(
                output,
                token_ids=output.token_ids[:1],
                logprobs=output.logprobs[:1],
                finish_reason=None,
                finish_detail="",
            )
        )

    def _on_decode(self, output: Output) -> list[Action]:
        actions: list[Action] = []
        if not self._is_running:
            self._is_running = True
            if self._early is not None and output.token_ids:
                if (output.index, output.token_ids[0]) != (0, self._early):
                    return self._on_disagreement(output)
                output = replace(
                    output, index=1, token_ids=output.token_ids[1:], logprobs=output.logprobs[1:]
                )
            assert self._route is not None, "an open leg has a route"
            actions.append(Report(self._route))
        if output.index != self.num_tokens:
            detail = f"token {output.index} came where {self.num_tokens} was due"
            return self._on_failure(Side.DECODE, LegFailure(Fault.BROKEN, detail))
        if output.token_ids or output.finish_reason is not None:
            cached = max(self._num_cached, output.num_cached_tokens)
            actions += self._deliver(replace(output, num_cached_tokens=cached))
        if output.finish_reason is not None:
            actions += [*self._end(), Finish()]
        return actions

    def _on_disagreement(self, output: Output) -> list[Action]:
        detail = (
            f"its first token is {output.token_ids[0]}, but the client was given {self._early} "
            "of the prefill instance; the two do not compute the same"
        )
        return self._on_failure(Side.DECODE, LegFailure(Fault.BROKEN, detail))

    def _deliver(self, output: Output) -> list[Action]:
        self.state = RouteState.STREAMING
        self.num_tokens += len(output.token_ids)
        return [Deliver(output)]

    def _on_failure(self, side: Side, failure: LegFailure) -> list[Action]:
        if side is Side.PREFILL and self._is_running:
            return []
        assert self._route is not None, "an open leg has a route"
        if failure.fault is Fault.REFUSED:
            return self.fail(BadRequest(failure.detail, param="prompt"))
        failed = Failed(self._route, side, failure)
        self.failed.append(failed)
        report = [Report(self._route, failed)] if failure.counts else []
        if self.state is RouteState.STREAMING:
            return [*report, *self.fail(GenerationFailed(f"{failed}; the answer is incomplete"))]
        closing = self._close()
        if self.num_attempts < self.max_attempts:
            return [*report, *closing, *self._try()]
        return [*report, *closing, *self._give_up()]

    def _give_up(self) -> list[Action]:
        if not self.failed:
            return self.fail(Unavailable(self.nobody()))
        if self.is_room_given and self.failed[-1].failure.fault is Fault.CONFLICT:
            return self.fail(
                RoomInUse(
                    f"bootstrap_room={self.room} belongs to a request that still runs "
                    f"({self.failed[-1]}); choose another, or leave it out"
                )
            )
        tries = "; ".join(map(str, self.failed))
        return self.fail(Unavailable(f"{self.num_attempts} of {self.max_attempts} tries: {tries}"))

    def _close(self) -> list[Action]:
        sides = frozenset(self._open)
        self._open = set()
        return [CloseLegs(self.attempt, sides)] if sides else []

    def _end(self) -> list[Action]:
        self.state = RouteState.END
        return self._close()
