"""A decode rank finds prefill instances and notices when one is gone, over real HTTP."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from inferkit.kv_transfer.directory import PrefillDirectory
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.rank_mapping import PrefillServerInfo
from inferkit.kv_transfer.registration import RankRegistration
from inferkit.kv_transfer.route import MAX_BODY_BYTES, refusal_text
from inferkit.kv_transfer.scout import Scout, ScoutFailed
from tests.kv_transfer.bootstrap import (
    full_table,
    layout,
    listening,
    port_of,
    registration,
    serving,
    serving_app,
    table,
    until,
    url_of,
)

INTERVAL_S = 0.1
OLD, NEW = Peer("p", 1), Peer("p", 2)


class Owner:
    """What a scout's callbacks said, in order."""

    def __init__(self, **options: Any) -> None:
        self.told: list[tuple[str, Peer]] = []
        self.infos: list[PrefillServerInfo] = []
        self.at_s: list[float] = []
        self.scout = Scout(
            on_route=self._on_route,
            on_lost=lambda peer: self._tell("lost", peer),
            on_found=lambda peer: self._tell("found", peer),
            **({"interval_s": INTERVAL_S} | options),
        )

    def _on_route(self, info: PrefillServerInfo) -> None:
        self.infos.append(info)
        self._tell("route", info.peer)

    def _tell(self, kind: str, peer: Peer) -> None:
        self.told.append((kind, peer))
        self.at_s.append(time.monotonic())

    def wait_for(self, *told: tuple[str, Peer]) -> None:
        until(lambda: len(self.told) >= len(told))
        assert self.told == list(told)

    def fault(self, kind: str) -> int:
        return self.scout.stats().get(f"fault_{kind}", 0)


@contextmanager
def scouting(**options: Any) -> Iterator[Owner]:
    owner = Owner(**options)
    owner.scout.start()
    try:
        yield owner
    finally:
        owner.scout.close()
        assert not owner.scout._thread.is_alive()


def test_a_route_is_told_milliseconds_after_its_server_is_watched_first() -> None:
    # At rest for long: every answer is to the first question.
    with serving(full_table(4)) as url, scouting(interval_s=60.0) as owner:
        time.sleep(0.3)
        started = time.monotonic()
        owner.scout.watch(url + "/")
        owner.wait_for(("route", OLD))
        assert owner.at_s[0] - started < 1.0, "it is a few milliseconds on an idle machine"
        assert owner.infos[0].addresses == {
            rank: f"tcp://127.0.0.1:{7000 + rank}" for rank in range(4)
        }
        assert owner.infos[0].layout == layout(tp=4)
        owner.scout.watch(url)
        assert owner.scout.stats() == {"watched": 1, "reachable": 1}


def test_a_route_is_told_when_the_last_rank_has_registered() -> None:
    known, instance = table(), layout(tp=2)
    known.register(registration(0, layout=instance))
    with serving(known) as url, scouting(interval_s=60.0) as owner:
        owner.scout.watch(url)
        until(lambda: owner.fault("incomplete") >= 2)
        assert owner.told == []
        known.register(registration(1, layout=instance))
        owner.scout.watch(url)
        owner.wait_for(("route", OLD))


def test_a_server_may_come_after_its_first_watch() -> None:
    with listening() as listener:
        url = url_of(listener)
    with scouting(interval_s=60.0) as owner:
        owner.scout.watch(url)
        until(lambda: owner.fault("unreachable") >= 2)
        with serving(full_table(), port_of(url)):
            owner.scout.watch(url)
            owner.wait_for(("route", OLD))


def test_a_peer_is_lost_after_three_misses_and_found_again() -> None:
    with scouting() as owner:
        with serving(full_table()) as url:
            owner.scout.watch(url)
            owner.wait_for(("route", OLD))
        owner.wait_for(("route", OLD), ("lost", OLD))
        assert owner.fault("unreachable") >= 3
        with serving(full_table(), port_of(url)):
            owner.wait_for(("route", OLD), ("lost", OLD), ("found", OLD))


def test_an_instance_that_restarts_at_the_address_is_another_peer() -> None:
    with scouting() as owner:
        with serving(full_table()) as url:
            owner.scout.watch(url)
            owner.wait_for(("route", OLD))
        with serving(full_table(2, epoch=2), port_of(url)):
            owner.wait_for(("route", OLD), ("lost", OLD), ("route", NEW))
        assert owner.infos[-1].world_size == 2


def test_a_new_life_that_a_request_is_for_is_found_before_the_interval_is_over() -> None:
    with scouting(interval_s=60.0) as owner:
        with serving(full_table()) as url:
            owner.scout.watch(url, OLD)
            owner.wait_for(("route", OLD))
        with serving(full_table(epoch=2), port_of(url)):
            owner.scout.watch(url, NEW)
            owner.wait_for(("route", OLD), ("lost", OLD), ("route", NEW))


def test_a_bootstrap_server_that_restarts_empty_loses_no_peer() -> None:
    with scouting() as owner:
        with serving(full_table()) as url:
            owner.scout.watch(url)
            owner.wait_for(("route", OLD))
        later = table()
        with serving(later, port_of(url)):
            time.sleep(3 * INTERVAL_S)
            later.register(registration())
            time.sleep(3 * INTERVAL_S)
        assert [told for told in owner.told if told[1] != OLD] == []
        assert owner.told[0] == ("route", OLD)
        assert owner.told.count(("route", OLD)) == 1


def test_a_server_that_hangs_is_lost() -> None:
    with scouting(probe_timeout_s=0.3) as owner:
        with serving(full_table()) as url:
            owner.scout.watch(url)
            owner.wait_for(("route", OLD))
        with listening(port_of(url)):
            until(lambda: owner.fault("timeout") >= 1)
            owner.wait_for(("route", OLD), ("lost", OLD))


def test_a_server_that_hangs_delays_no_other() -> None:
    with scouting(probe_timeout_s=30.0) as owner, listening() as listener:
        listener.settimeout(10)
        owner.scout.watch(url_of(listener))
        with listener.accept()[0], serving(full_table()) as other:
            owner.scout.watch(other)
            owner.wait_for(("route", OLD))
            assert owner.fault("timeout") == 0


def test_a_server_that_trickles_is_no_answer() -> None:
    with listening() as listener, scouting(probe_timeout_s=0.5) as owner:
        listener.settimeout(10)
        over = threading.Event()

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
                while not over.wait(0.05):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        owner.scout.watch(url_of(listener))
        until(lambda: owner.fault("timeout") >= 1)
        over.set()
        thread.join(10)


def route_with(**changed: Any) -> bytes:
    said = msgspec.to_builtins(full_table(2).route())
    return msgspec.json.encode(said | changed)


HUGE = msgspec.to_builtins(layout(tp=1, dp=2**50))
RANKS = msgspec.to_builtins(full_table(2).route())["ranks"]


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, b"", "malformed"),
        (200, b"<html>hello</html>", "malformed"),
        (200, b"\xff\xfe", "malformed"),
        (200, b"[" * 100_000, "malformed"),
        (200, route_with() + b" " * MAX_BODY_BYTES, "malformed"),
        (200, route_with(epoch=-1), "malformed"),
        (200, route_with(epoch=2**64), "malformed"),
        (200, route_with(protocol_version=2), "malformed"),
        (200, route_with(layout=HUGE, ranks={}), "malformed"),
        (200, route_with(layout=5), "malformed"),
        (200, route_with(ranks={}), "malformed"),
        (200, route_with(ranks={"0,0,0": RANKS["0,0,0"]}), "malformed"),
        (200, route_with(ranks={"0,0,0": RANKS["0,0,1"], "0,0,1": RANKS["0,0,0"]}), "malformed"),
        (
            200,
            route_with(ranks=RANKS | {"0,0,1": RANKS["0,0,1"] | {"rank_ip": "h;evil"}}),
            "malformed",
        ),
        (
            200,
            route_with(ranks=RANKS | {"0,0,1": RANKS["0,0,1"] | {"rank_port": 0}}),
            "malformed",
        ),
        (302, b"", "status"),
        (404, b"{}", "status"),
        (500, b"oops", "status"),
        (401, b"who are you", "refused"),
    ],
)
def test_an_answer_that_cannot_be_used_is_counted_and_never_raised(
    status: int, body: bytes, kind: str
) -> None:
    async def strange(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-encoding", b"gzip"), (b"location", b"/elsewhere")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    with serving_app(strange) as url, scouting() as owner:
        owner.scout.watch(url)
        until(lambda: owner.fault(kind) >= 2)
        assert owner.told == []
        owner.scout.watch(url)


def test_bytes_that_are_no_http_are_a_miss() -> None:
    with listening() as listener, scouting() as owner:
        listener.settimeout(10)
        owner.scout.watch(url_of(listener))
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\x00\xff" * 100)
        until(lambda: owner.fault("unreachable") >= 2)
        assert owner.told == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "ftp://127.0.0.1:1",
        "http://",
        "http://[::1",
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:x",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:1/path",
        "http://user@127.0.0.1:1",
        "http://\x00:1",
        "http://" + "a" * 100_000 + ":x",
    ],
)
def test_what_is_no_url_is_a_fault_of_that_server_only(url: str) -> None:
    with serving(full_table()) as good, scouting() as owner:
        owner.scout.watch(url)
        until(lambda: owner.fault("no_url") >= 2)
        owner.scout.watch(good)
        owner.wait_for(("route", OLD))


def test_answers_are_believed_only_when_they_are_signed() -> None:
    secret = b"a" * 16
    with serving(full_table(), secret=secret) as url:
        with scouting(secret=secret) as owner:
            owner.scout.watch(url)
            owner.wait_for(("route", OLD))
            until(lambda: owner.scout.stats() == {"watched": 1, "reachable": 1})
        for other in (b"b" * 16, b""):
            with scouting(secret=other) as owner:
                owner.scout.watch(url)
                until(lambda: owner.fault("refused") >= 1)
                assert owner.told == []
    with serving(full_table()) as url, scouting(secret=secret) as owner:
        owner.scout.watch(url)
        until(lambda: owner.fault("unsigned") >= 1)
        assert owner.told == []


def test_ranks_that_register_are_reached_by_the_directory_of_a_decode_rank() -> None:
    directory = PrefillDirectory(layout=layout(), tp_rank=0, decode_id="d")
    owner = Owner()
    owner.scout.routes.on_route = directory.learn
    with listening() as listener:
        url = url_of(listener)
    lives = [Peer("p", 1), Peer("q", 7)]
    for peer in lives:
        own = {"instance_id": peer.instance_id, "epoch": peer.epoch}
        ranks = [
            RankRegistration(
                url=url,
                register=registration(rank, layout=layout(tp=2), **own),
                interval_s=INTERVAL_S,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        if peer == lives[0]:
            owner.scout.start()
        owner.scout.watch(url, peer)
        with serving(table(**own), port_of(url)):
            until(lambda peer=peer: directory.routes(peer, 5) is not None)
            assert directory.address(peer, 1) == "tcp://127.0.0.1:7001"
            for rank in ranks:
                rank.close()
    owner.scout.close()
    assert ("lost", lives[0]) in owner.told


def test_proxies_of_the_environment_are_not_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(full_table()) as url, scouting() as owner:
        owner.scout.watch(url)
        owner.wait_for(("route", OLD))


def test_many_threads_watch_while_servers_come_and_go() -> None:
    over = threading.Event()
    failures: list[BaseException] = []

    def work(urls: list[str]) -> None:
        while not over.wait(0.0005):
            try:
                for url in urls:
                    owner.scout.watch(url, NEW)
            except BaseException as error:
                failures.append(error)
                raise

    with listening() as listener:
        url = url_of(listener)
    owner = Owner(interval_s=0.02)
    owner.scout.start()
    threads = [threading.Thread(target=work, args=([url, "http://127.0.0.1:1"],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        with serving(full_table(), port_of(url)):
            until(lambda: url in owner.scout.routes.settled())
        until(lambda: url not in owner.scout.routes.settled())
    owner.scout.close()
    over.set()
    for thread in threads:
        thread.join(10)
    assert not owner.scout._thread.is_alive() and failures == []
    expected = [("route", OLD), ("lost", OLD), ("found", OLD)]
    assert owner.told == [*expected, ("lost", OLD), ("found", OLD), ("lost", OLD)]


def test_a_callback_that_fails_ends_the_scout_and_the_owner_hears_of_it() -> None:
    def broken(info: PrefillServerInfo) -> None:
        raise ValueError("no such thing")

    scout = Scout(on_route=broken, on_lost=print, on_found=print)
    scout.start()
    with serving(full_table()) as url:
        scout.watch(url)
        until(lambda: not scout._thread.is_alive())
        with pytest.raises(ScoutFailed, match="no such thing"):
            scout.watch(url)
    scout.close()


def test_nothing_is_told_after_close() -> None:
    with serving(full_table()) as url:
        with scouting() as owner:
            owner.scout.watch(url)
            owner.wait_for(("route", OLD))
        owner.scout.watch(url)
        owner.scout.close()
    time.sleep(2 * INTERVAL_S)
    assert owner.told == [("route", OLD)]


def test_a_server_that_hangs_does_not_hold_up_the_end() -> None:
    with listening() as listener:
        with scouting(interval_s=60.0, probe_timeout_s=60.0) as owner:
            owner.scout.watch(url_of(listener))
            listener.settimeout(10)
            connection, _ = listener.accept()
            started = time.monotonic()
        assert time.monotonic() - started < 5.0
        connection.close()


def test_many_servers_are_asked_by_one_thread() -> None:
    before = threading.active_count()
    with serving(full_table()) as url, scouting(interval_s=1.0) as owner:
        for number in range(2, 52):
            owner.scout.watch(f"http://127.0.0.{number}:{port_of(url)}")
        owner.scout.watch(url)
        owner.wait_for(("route", OLD))
        until(lambda: owner.scout.stats()["watched"] == 51)
        assert threading.active_count() == before + 2


def test_watching_before_the_start_is_heard_and_close_may_come_without_it() -> None:
    owner = Owner()
    with serving(full_table()) as url:
        owner.scout.watch(url)
        owner.scout.start()
        owner.wait_for(("route", OLD))
        owner.scout.close()
    Owner().scout.close()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"1 of 2","code":null}}', "status 503: '1 of 2'"),
        (b"\xff\nplain", r"status 503: '\ufffd\nplain'"),
        (b"", "status 503: ''"),
        (b"[" * 100_000, "status 503: '" + "[" * 299),
    ],
)
def test_a_refusal_is_one_short_line(body: bytes, text: str) -> None:
    assert refusal_text(503, body) == text
