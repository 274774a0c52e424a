"""The state machine of a request, driven through random schedules."""

import random

import pytest

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
from inferkit.online.facts import InstanceFacts, Side
from inferkit.online.router.route import Route
from inferkit.online.router.routed_request import (
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

NUM_SCHEDULES = 3000
ROOM = 7
HEADER = {"instance_id": "router", "epoch": 1, "peer_epoch": 1}


def facts(side, number):
    return InstanceFacts(
        url=f"http://{side}{number}:1", side=side, instance_id=f"{side}{number}", epoch=number
    )


ROUTES = [Route(facts(Side.PREFILL, p), facts(Side.DECODE, d)) for p in (1, 2) for d in (1, 2)]


def output(attempt, **fields):
    fields.setdefault("index", 0)
    return Output(**HEADER, room=ROOM, attempt=attempt, **fields)


class World:
    """Legs, the client, and every rule that must hold after each event."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.first_token = self.random.choice(list(Side))
        self.max_attempts = self.random.randint(1, 4)
        self.attempts = []
        self.open = set()
        self.sent = {}
        self.said = {}
        self.last_reason = None
        self.is_decoding = False
        self.tokens = []
        self.token_attempts = set()
        self.end = None
        self.reports = []
        self.request = RoutedRequest(
            header=HEADER,
            room=ROOM,
            max_attempts=self.max_attempts,
            first_token=self.first_token,
            choose=self._choose,
            next_attempt=self._next_attempt,
        )
        self._last_attempt = self.random.randrange(1000)

    def _choose(self, room, attempt, failed):
        assert room == ROOM
        return self.random.choice([*ROUTES, None]) if self.random.random() < 0.1 else ROUTES[0]

    def _next_attempt(self):
        self._last_attempt += self.random.randint(1, 3)
        return self._last_attempt

    def do(self, actions):
        for action in actions:
            assert self.end is None, "nothing comes after the end"
            if isinstance(action, OpenLegs):
                assert action.attempt not in self.attempts, "an attempt is never used twice"
                assert not self.tokens, "no retry after a byte"
                assert not self.open, "the legs of the attempt before are closed"
                self.attempts.append(action.attempt)
                self.open = {(action.attempt, side) for side in Side}
                for leg in self.open:
                    self.sent[leg], self.said[leg] = 0, []
            elif isinstance(action, CloseLegs):
                closed = {(action.attempt, side) for side in action.sides}
                assert closed and closed <= self.open, "only what is open is closed"
                self.open -= closed
            elif isinstance(action, Deliver):
                assert action.output.index == len(self.tokens)
                self.tokens += action.output.token_ids
                if action.output.token_ids:
                    self.token_attempts.add(action.output.attempt)
                self.last_reason = action.output.finish_reason
            elif isinstance(action, Finish):
                self.end = action
            elif isinstance(action, Report):
                self.reports.append(action)
        assert len(self.token_attempts) <= 1, "all tokens come from one attempt"
        assert len(self.attempts) <= self.max_attempts
        assert (self.end is not None) == (self.request.state is RouteState.END)
        if self.end is not None:
            assert not self.open, "both legs are closed when it is over"
            if self.end.error is None and self.last_reason is not FinishReason.ABORT:
                said = self.said[self.attempts[-1], Side.DECODE]
                assert self.tokens == said, "the whole answer of decode, and nothing else"

    def event(self):
        """Something happens; legs that are closed may still be heard."""
        draw = self.random
        attempt = draw.choice(self.attempts)
        side = draw.choice(list(Side))
        leg = (attempt, side)
        kind = draw.choice(["token"] * 8 + ["end"] * 2 + ["fault", "bad end", "abort", "expire"])
        if kind == "abort" and draw.random() < 0.2:
            self.do(self.request.abort("asked for"))
        elif kind == "expire" and draw.random() < 0.2:
            self.do(self.request.expire())
        elif kind == "fault":
            fault = draw.choice(list(Fault))
            self.open.discard(leg)
            self.do(self.request.on_leg_failed(attempt, side, LegFailure(fault, "broken")))
        elif kind in ("token", "end", "bad end"):
            self._say(leg, kind)
        if kind in ("fault", "bad end") and side is Side.PREFILL and self.is_decoding:
            assert self.end is None, "decode that runs needs nobody"
        num_said = len(self.said.get((self.request.attempt, Side.DECODE), ()))
        self.is_decoding = self.end is None and num_said > 0 and bool(self.tokens)

    def _say(self, leg, kind):
        draw, (attempt, side) = self.random, leg
        index = self.sent.get(leg, 0)
        count = draw.randint(0 if kind != "token" else 1, 3)
        if side is Side.PREFILL:
            count = 1 if index == 0 else 0
            if not count and kind == "token":
                return
        reason = None
        if kind == "end":
            reason = draw.choice([FinishReason.STOP, FinishReason.LENGTH])
        elif kind == "bad end":
            count = 0
            reason = draw.choice(
                [
                    FinishReason.REFUSED,
                    FinishReason.CONFLICT,
                    FinishReason.UNAVAILABLE,
                    FinishReason.ABORT,
                ]
            )
        if reason is not None:
            self.open.discard(leg)
        self.sent[leg] = index + count
        tokens = list(range(index, index + count))
        if side is Side.DECODE and tokens and index == 0 and draw.random() < 0.02:
            tokens[0] = 99  # it disagrees with prefill
        self.said[leg] += tokens
        message = output(attempt, index=index, token_ids=tokens, finish_reason=reason)
        self.do(self.request.on_output(attempt, side, message))


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, 500))
def test_no_schedule_breaks_a_rule(first):
    run_schedules(range(first, first + 500))


@pytest.mark.fuzz
def test_no_schedule_of_many_breaks_a_rule():
    run_schedules(range(NUM_SCHEDULES, 100_000))


def run_schedules(seeds):
    ends = set()
    for seed in seeds:
        world = World(seed)
        world.do(world.request.start())
        for _ in range(200):
            if world.end is not None or not world.attempts:
                break
            world.event()
        if world.end is None:
            world.do(world.request.expire())
        ends.add(type(world.end.error))
        before = (list(world.tokens), world.request.num_ignored)
        for attempt in world.attempts:
            for side in Side:
                assert world.request.on_output(attempt, side, output(attempt, token_ids=[1])) == []
                failure = LegFailure(Fault.BROKEN, "late")
                assert world.request.on_leg_failed(attempt, side, failure) == []
        assert world.request.abort("late") == [] == world.request.cancel()
        assert world.tokens == before[0]
        assert world.request.num_ignored == before[1] + 4 * len(world.attempts)
    assert {type(None), Unavailable, BadRequest, GenerationFailed} <= ends


def started(**options):
    options = {"max_attempts": 2, "choose": lambda *_: ROUTES[0]} | options
    numbers = iter(range(1, 100))
    request = RoutedRequest(header=HEADER, room=ROOM, next_attempt=lambda: next(numbers), **options)
    return request, request.start()


def test_a_request_that_goes_well():
    request, actions = started()
    assert actions == [OpenLegs(1, ROUTES[0])]
    first = output(1, token_ids=[5], num_cached_tokens=3, finish_reason=FinishReason.LENGTH)
    assert request.on_output(1, Side.PREFILL, first) == []
    report, deliver = request.on_output(1, Side.DECODE, output(1, token_ids=[5, 6]))
    assert report == Report(ROUTES[0]) and deliver.output.token_ids == [5, 6]
    assert deliver.output.num_cached_tokens == 3, "prefill knows what it had"
    last = output(1, index=2, finish_reason=FinishReason.STOP)
    deliver, finish = request.on_output(1, Side.DECODE, last)
    assert deliver.output.finish_reason is FinishReason.STOP and finish == Finish(None)
    assert request.state is RouteState.END


def test_the_end_of_decode_closes_a_prefill_that_is_not_over():
    request, _ = started()
    message = output(1, token_ids=[5], finish_reason=FinishReason.LENGTH)
    actions = request.on_output(1, Side.DECODE, message)
    assert actions[2:] == [CloseLegs(1, frozenset({Side.PREFILL})), Finish(None)]


def test_a_failure_closes_the_other_leg_before_the_next_attempt():
    request, _ = started()
    failure = LegFailure(Fault.UNAVAILABLE, "busy")
    report, close, again = request.on_leg_failed(1, Side.DECODE, failure)
    assert report.failed.failure is failure
    assert close == CloseLegs(1, frozenset({Side.PREFILL}))
    assert again == OpenLegs(2, ROUTES[0])
    assert request.on_leg_failed(1, Side.PREFILL, failure) == [], "it is of the old attempt"


@pytest.mark.parametrize(
    ("fault", "error", "counts"),
    [
        (Fault.UNAVAILABLE, Unavailable, True),
        (Fault.BROKEN, Unavailable, True),
        (Fault.AWAY, Unavailable, False),
        (Fault.CONFLICT, RoomInUse, False),
        (Fault.REFUSED, BadRequest, False),
    ],
)
def test_what_the_client_hears_of_each_fault_and_whether_it_counts(fault, error, counts):
    request, _ = started(max_attempts=1, is_room_given=True)
    actions = request.on_leg_failed(1, Side.PREFILL, LegFailure(fault, "the cause"))
    assert isinstance(actions[-1].error, error) and "the cause" in str(actions[-1].error)
    assert any(isinstance(action, Report) for action in actions) == counts
    assert CloseLegs(1, frozenset({Side.DECODE})) in actions


def test_a_conflict_about_a_room_that_was_drawn_is_no_fault_of_the_client():
    request, _ = started(max_attempts=1)
    failure = LegFailure(Fault.CONFLICT, "not over yet")
    assert isinstance(request.on_leg_failed(1, Side.DECODE, failure)[-1].error, Unavailable)


def test_an_attempt_after_a_conflict_waits():
    request, _ = started(conflict_delay_s=lambda: 0.05)
    actions = request.on_leg_failed(1, Side.DECODE, LegFailure(Fault.CONFLICT, "room"))
    assert actions[-1] == OpenLegs(2, ROUTES[0], 0.05)


def test_without_a_pair_it_ends_at_once():
    request, actions = started(choose=lambda *_: None, nobody=lambda: "nobody is there")
    (finish,) = actions
    assert isinstance(finish.error, Unavailable) and str(finish.error) == "nobody is there"


def test_abort_gives_what_there_is_and_time_over_an_error():
    request, _ = started()
    request.on_output(1, Side.DECODE, output(1, token_ids=[5]))
    close, deliver, finish = request.abort("asked for")
    assert close.sides == frozenset(Side) and finish == Finish(None)
    end = deliver.output
    assert (end.index, end.token_ids, end.finish_reason) == (1, [], FinishReason.ABORT)
    request, _ = started()
    close, finish = request.expire()
    assert close.sides == frozenset(Side) and isinstance(finish.error, TimeOver)
    assert isinstance(finish.error, ServiceError)


def test_a_gap_in_the_tokens_is_a_broken_leg():
    request, _ = started()
    actions = request.on_output(1, Side.DECODE, output(1, index=1, token_ids=[6]))
    assert "token 1 came where 0 was due" in str(request.failed[0])
    assert actions[-1] == OpenLegs(2, ROUTES[0])
