"""When a decode rank looks again, and what it tells its owner, under a virtual clock."""

import logging
import random
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
    assert watched.miss() == 0.2
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


def test_a_life_may_end_between_two_questions() -> None:
    watched = Watched()
    watched.find()
    assert not watched.answer(health(ready=False))
    assert watched.answer(health())
    watched.routes.has_route(U, info(NEW))
    assert watched.told == [("route", info()), ("lost", OLD), ("route", info(NEW))]


def test_a_server_that_lacks_ranks_lives() -> None:
    watched = Watched()
    watched.find()
    watched.answer(health(ready=False))
    for _ in range(2):
        watched.miss()
    assert watched.answer(health())
    watched.routes.lacks_ranks(U, "1 of 2")
    for _ in range(2):
        watched.miss()
    assert watched.told == [("route", info())]


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
    assert watched.routes.settled() == {V: Peer("q", 1)}


def test_a_request_for_a_life_that_is_not_known_is_no_reason_to_wait_an_interval() -> None:
    watched = Watched()
    watched.find()
    watched.clock.now_s += 1.0
    watched.routes.watch(U, OLD)
    assert watched.routes.due() == []
    watched.routes.watch(U, NEW)
    assert watched.next_due() == 0.0
    assert watched.answer(health(NEW))
    watched.routes.has_route(U, info(NEW))
    watched.routes.watch(U, OLD)
    assert watched.next_due() == 5.0, "its end is known"
    assert watched.told == [("route", info()), ("lost", OLD), ("route", info(NEW))]


def test_no_server_is_asked_without_a_pause_however_many_wait() -> None:
    watched = Watched()
    watched.find()
    pauses = []
    for _ in range(4):
        for _ in range(10):
            watched.routes.watch(U, NEW)
        pauses.append(watched.next_due())
        assert watched.routes.due() == [U]
        watched.routes.watch(U, NEW)
        assert not watched.routes.answered(U, health(OLD))
    assert pauses == [0.2] * 4


def test_random_servers_end_as_what_they_are() -> None:
    """Lost and found alternate, only of lives that were told; a life that was replaced is lost;
    after a quiet while everybody knows what is behind each server."""
    for seed in range(200):
        RandomServers(seed).run()


class RandomServers:
    """Three addresses whose processes come and go, with answers that take their time."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.watched = Watched()
        self.urls = [f"http://{name}" for name in "abc"]
        self.lives: dict[str, tuple[Peer, bool] | None] = {url: None for url in self.urls}
        self.answers: list[tuple[float, str, Callable[[], None]]] = []
        self.epoch = 0

    def run(self) -> None:
        for _ in range(150):
            self.watched.clock.now_s += self.draw.choice([0.05, 0.3, 2.0, 20.0])
            self.change()
            if self.draw.random() < 0.5:
                self.watched.routes.watch(self.draw.choice(self.urls))
            self.look()
        self.check()
        for url in self.urls:
            if self.lives[url] is not None:
                self.lives[url] = (self.lives[url][0], True)
            self.watched.routes.watch(url)
        for _ in range(400):
            self.watched.clock.now_s += 0.2
            self.look()
        self.check()
        assert self.watched.routes.settled() == {
            url: life[0] for url, life in self.lives.items() if life is not None
        }

    def change(self) -> None:
        url, chance = self.draw.choice(self.urls), self.draw.random()
        life = self.lives[url]
        if chance < 0.15:
            self.lives[url] = None
        elif chance < 0.4 and life is None:
            self.epoch += 1
            self.lives[url] = (Peer(url[-1], self.epoch), False)
        elif chance < 0.6 and life is not None:
            self.lives[url] = (life[0], self.draw.random() < 0.8)

    def look(self) -> None:
        now = self.watched.clock.now_s
        for url in self.watched.routes.due():
            assert url not in {asked for _, asked, _ in self.answers}, "asked twice at a time"
            self.ask(url, self.watched.routes.known(url) is None)
        ready = [entry for entry in self.answers if entry[0] <= now]
        self.answers = [entry for entry in self.answers if entry[0] > now]
        for _, _, tell in ready:
            tell()

    def ask(self, url: str, for_route: bool) -> None:
        """The answer is what is true when it is asked."""
        life, routes = self.lives[url], self.watched.routes

        def tell() -> None:
            if life is None:
                routes.missed(url, "unreachable", "refused")
            elif not for_route:
                if routes.answered(url, health(life[0], ready=life[1])):
                    self.ask(url, True)
            elif life[1]:
                routes.has_route(url, info(life[0]))
            else:
                routes.lacks_ranks(url, "1 of 2")

        self.answers.append((self.watched.clock.now_s + self.draw.random(), url, tell))

    def check(self) -> None:
        known: dict[str, Peer] = {}
        state: dict[Peer, str] = {}
        for kind, what in self.watched.told:
            peer = what.peer if kind == "route" else what
            if kind == "route":
                former = known.get(peer.instance_id)
                assert former is None or former == peer or state[former] == "lost"
                known[peer.instance_id] = peer
            else:
                assert state[peer] == {"lost": "reachable", "found": "lost"}[kind]
            state[peer] = "lost" if kind == "lost" else state.get(peer, "reachable")
            if kind == "found":
                state[peer] = "reachable"


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
