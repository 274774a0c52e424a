"""When a decode rank looks again, and what it tells its owner, under a virtual clock."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from inferkit.core.messages import PROTOCOL_VERSION
from inferkit.kv_transfer.heartbeat import Heartbeat
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.rank_mapping import PrefillServerInfo
from inferkit.kv_transfer.route import Health
from inferkit.kv_transfer.watched_routes import FORGET_S, RECENT_S, WatchedRoutes
from tests.kv_transfer.bootstrap import layout
from tests.kv_transfer.ranks_alone import Clock

U, V = "http://u", "http://v"
OLD, NEW = Peer("p", 1), Peer("p", 2)


def info(peer: Peer = OLD, port: int = 1) -> PrefillServerInfo:
    return PrefillServerInfo(peer=peer, layout=layout(), addresses={0: f"tcp://h:{port}"})


def health(peer: Peer = OLD, *, ready: bool = True) -> Health:
    return Health(
        ready=ready,
        instance_id=peer.instance_id,
        epoch=peer.epoch,
        protocol_version=PROTOCOL_VERSION,
    )


class Watched:
    def __init__(self) -> None:
        self.clock = Clock()
        self.told: list[tuple[str, Any]] = []
        self.routes = WatchedRoutes(
            heartbeat=Heartbeat(interval_s=5.0, num_misses=3, clock=self.clock),
            on_route=self._tell("route"),
            on_lost=self._tell("lost"),
            on_found=self._tell("found"),
            clock=self.clock,
        )

    def _tell(self, kind: str) -> Callable[[Any], None]:
        return lambda what: self.told.append((kind, what))

    def news(self) -> list[tuple[str, Any]]:
        """What was told since the last call."""
        told, self.told = self.told, []
        return told

    def next_due(self) -> float:
        """Go to the time of the next probe; seconds until then."""
        seconds = self.routes.heartbeat.seconds_to_next()
        assert seconds is not None
        self.clock.now_s += seconds
        return round(seconds, 3)

    def find(self, peer: Peer = OLD, url: str = U) -> None:
        self.routes.watch(url)
        assert self.routes.due() == [url]
        self.routes.has_route(url, info(peer))

    def miss(self) -> float:
        seconds = self.next_due()
        assert self.routes.due() == [U]
        self.routes.missed(U, "unreachable", "refused")
        return seconds

    def answer(self, said: Health) -> bool:
        self.next_due()
        assert self.routes.due() == [U]
        return self.routes.answered(U, said)


def test_a_server_is_asked_at_once_and_then_every_interval() -> None:
    watched = Watched()
    assert watched.routes.due() == []
    watched.routes.watch(U)
    assert watched.routes.due() == [U]
    assert watched.routes.known(U) is None
    watched.routes.has_route(U, info())
    assert watched.news() == [("route", info())]
    assert watched.routes.known(U) == OLD and watched.routes.is_settled(U)
    for _ in range(3):
        watched.routes.watch(U)
        assert watched.next_due() == 5.0
        assert watched.routes.due() == [U]
        assert not watched.routes.answered(U, health())
    assert watched.news() == []


def test_a_route_that_somebody_waits_for_is_asked_soon_and_then_less_often() -> None:
    watched = Watched()
    watched.routes.watch(U)
    pauses = [watched.miss() for _ in range(7)]
    assert pauses == [0.0, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    watched.routes.watch(U)
    assert watched.next_due() == 0.2
    assert watched.routes.due() == [U]
    watched.routes.lacks_ranks(U, "1 of 2")
    assert watched.next_due() == 0.4
    assert watched.news() == []


def test_a_server_that_is_asked_is_not_asked_again_meanwhile() -> None:
    watched = Watched()
    watched.routes.watch(U)
    assert watched.routes.due() == [U]
    watched.clock.now_s += 100
    watched.routes.watch(U)
    assert watched.routes.due() == []
    watched.routes.missed(U, "timeout", "2 s")
    assert watched.next_due() == 0.2


def test_nobody_hurries_for_a_route_that_nobody_waits_for() -> None:
    watched = Watched()
    watched.routes.watch(U)
    watched.clock.now_s += RECENT_S + 1
    watched.miss()
    assert watched.next_due() == 5.0


def test_three_misses_lose_a_peer_once_and_an_answer_finds_it() -> None:
    watched = Watched()
    watched.find()
    watched.news()
    assert [watched.miss() for _ in range(2)] == [5.0, 5.0]
    assert watched.news() == []
    assert watched.miss() == 5.0
    assert watched.news() == [("lost", OLD)]
    assert not watched.routes.is_settled(U)
    assert watched.miss() == 0.2
    assert not watched.answer(health())
    assert watched.news() == [("found", OLD)]
    assert [watched.miss() for _ in range(2)] == [5.0, 5.0]
    assert not watched.answer(health())
    assert watched.news() == []


def test_misses_before_a_route_lose_nobody() -> None:
    watched = Watched()
    watched.routes.watch(U)
    for _ in range(5):
        watched.miss()
    watched.next_due()
    watched.find()
    assert watched.news() == [("route", info())]
    assert [watched.miss() for _ in range(2)] and watched.news() == []


@pytest.mark.parametrize("new", [NEW, Peer("q", 1)])
def test_a_new_life_at_the_address_replaces_the_old_one_at_once(new: Peer) -> None:
    watched = Watched()
    watched.find()
    watched.news()
    assert not watched.answer(health(new, ready=False))
    assert watched.news() == [("lost", OLD)]
    assert watched.routes.known(U) is None
    assert watched.next_due() == 0.2
    assert watched.routes.due() == [U]
    watched.routes.has_route(U, info(new))
    assert watched.news() == [("route", info(new))]
    assert not watched.answer(health(new))
    assert watched.news() == []


def test_a_new_life_that_is_complete_already_is_asked_for_its_route() -> None:
    watched = Watched()
    watched.find()
    assert watched.answer(health(NEW))
    watched.routes.has_route(U, info(NEW))
    assert watched.news() == [("route", info()), ("lost", OLD), ("route", info(NEW))]


def test_a_life_that_was_lost_is_not_lost_again_by_its_successor() -> None:
    watched = Watched()
    watched.find()
    for _ in range(3):
        watched.miss()
    watched.news()
    assert watched.answer(health(NEW))
    watched.routes.has_route(U, info(NEW))
    assert watched.news() == [("route", info(NEW))]


def test_a_server_that_restarted_empty_loses_nobody() -> None:
    watched = Watched()
    watched.find()
    watched.news()
    assert not watched.answer(health(ready=False))
    assert watched.routes.is_settled(U)
    assert watched.answer(health())
    watched.routes.has_route(U, info())
    assert watched.news() == []
    assert not watched.answer(health(ready=False))
    assert watched.answer(health())
    watched.routes.has_route(U, info(port=2))
    assert watched.news() == [("route", info(port=2))]


def test_servers_that_nobody_watches_are_forgotten_and_may_come_back() -> None:
    watched = Watched()
    watched.find()
    watched.news()
    for _ in range(3):
        watched.miss()
    assert watched.news() == [("lost", OLD)]
    watched.clock.now_s += FORGET_S + 1
    assert watched.routes.due() == []
    assert watched.routes.heartbeat.seconds_to_next() is None
    watched.find()
    assert watched.news() == [("route", info()), ("found", OLD)]


def test_two_servers_have_nothing_to_do_with_each_other() -> None:
    watched = Watched()
    watched.find()
    watched.find(Peer("q", 1), V)
    watched.news()
    watched.next_due()
    for _ in range(3):
        for url in watched.routes.due():
            if url == U:
                watched.routes.missed(url, "timeout", "2 s")
            else:
                watched.routes.answered(url, health(Peer("q", 1)))
        watched.next_due()
    assert watched.news() == [("lost", OLD)]
    assert watched.routes.settled() == {V}


def test_faults_are_counted_and_logged_when_they_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watched = Watched()
    watched.routes.watch(U)
    for kind in ("timeout", "timeout", "timeout", "malformed", "timeout"):
        watched.next_due()
        assert watched.routes.due() == [U]
        watched.routes.missed(U, kind, "why")
    assert watched.routes.stats() == {
        "watched": 1,
        "reachable": 0,
        "fault_malformed": 1,
        "fault_timeout": 4,
    }
    assert len(caplog.messages) == 3
