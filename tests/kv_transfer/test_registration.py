"""A rank registers for as long as it lives, over real HTTP."""

import logging
import time
from typing import Any

import pytest

from inferkit.core.errors import ConfigError
from inferkit.kv_transfer.registration import RankRegistration
from tests.kv_transfer.bootstrap import (
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
from tests.kv_transfer.ranks_alone import Clock

INTERVAL_S = 0.2
LOGGER = "inferkit.kv_transfer.registration"


class Ranks:
    """All ranks of an instance, started and closed together."""

    def __init__(self, url: str, num_ranks: int = 1, **options: Any) -> None:
        self.ranks = [
            RankRegistration(
                url=url,
                register=registration(rank, layout=layout(tp=num_ranks)),
                **({"interval_s": INTERVAL_S} | options),
            )
            for rank in range(num_ranks)
        ]

    def __enter__(self) -> "Ranks":
        for rank in self.ranks:
            rank.start()
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self.ranks:
            rank.close()

    @property
    def are_registered(self) -> bool:
        return all(rank.is_registered for rank in self.ranks)


def test_sixteen_ranks_register_at_once() -> None:
    known = table()
    with serving(known) as url, Ranks(url + "/", 16) as ranks:
        until(lambda: ranks.are_registered)
        assert known.health().ready
        assert known.route().ranks["0,0,15"].rank_port == 7015


def test_a_server_that_restarts_empty_hears_of_every_rank_within_the_interval() -> None:
    with serving(table()) as url:
        with Ranks(url, 2) as ranks:
            until(lambda: ranks.are_registered)
            later = table()
            assert not later.health().ready
        port = port_of(url)
    with Ranks(url, 2) as ranks:
        until(lambda: not ranks.are_registered)
        with serving(later, port) as again:
            assert again == url
            until(lambda: later.health().ready)
            until(lambda: ranks.are_registered)


def test_a_rank_that_goes_on_registering_is_not_forgotten() -> None:
    clock = Clock()
    known = table(clock=clock)
    with serving(known) as url:
        with Ranks(url) as ranks:
            until(lambda: ranks.are_registered)
            for _ in range(5):
                clock.now_s += 5.0
                assert known.health().ready
                until(lambda: known._entries[0].expires_at == clock.now_s + known.ttl_s)
        clock.now_s += known.ttl_s
        assert not known.health().ready


def test_what_is_wrong_is_logged_when_it_changes_and_not_with_every_try(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    with listening() as listener:
        url = url_of(listener)
    with Ranks(url) as ranks:
        until(lambda: "ConnectError" in str(ranks.ranks[0]._fault))
        time.sleep(3 * INTERVAL_S)
        with serving(table(epoch=9), port_of(url)):
            until(lambda: "409" in str(ranks.ranks[0]._fault))
            time.sleep(3 * INTERVAL_S)
        known = table()
        with serving(known, port_of(url)):
            until(lambda: ranks.are_registered)
            time.sleep(3 * INTERVAL_S)
            for rank in ranks.ranks:
                rank.close()
    told = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    texts = [text for text in told if "ConnectError" not in text]
    assert "rank=0 cannot register" in told[0] and "ConnectError" in told[0]
    assert len(texts) == 2
    assert "status 409" in texts[0] and "epoch=1 of rank 0" in texts[0] and "9;" in texts[0]
    assert "rank=0 is registered" in texts[1]
    assert len(told) <= 4


def test_a_server_that_never_answers_is_given_up_and_asked_again() -> None:
    with listening() as listener:
        with Ranks(url_of(listener)) as ranks:
            listener.settimeout(10)
            for _ in range(2):
                listener.accept()[0].close()
            assert not ranks.are_registered
        for rank in ranks.ranks:
            assert not rank._thread.is_alive()


def test_answers_that_make_no_sense_are_no_registration() -> None:
    async def nonsense(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 302, "headers": [(b"location", b"/")]})
        await send({"type": "http.response.body", "body": b"\xff" * 5000})

    with serving_app(nonsense) as url, Ranks(url) as ranks:
        until(lambda: "302" in str(ranks.ranks[0]._fault))
        assert len(str(ranks.ranks[0]._fault)) < 400


def test_a_registration_is_signed_with_the_secret() -> None:
    known = table()
    with serving(known, secret=b"a" * 16) as url:
        with Ranks(url, secret=b"b" * 16) as ranks:
            until(lambda: "401" in str(ranks.ranks[0]._fault))
        assert not known.health().ready
        with Ranks(url, secret=b"a" * 16) as ranks:
            until(lambda: ranks.are_registered)
        assert known.health().ready


def test_proxies_of_the_environment_are_not_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(table()) as url, Ranks(url) as ranks:
        until(lambda: ranks.are_registered)


@pytest.mark.parametrize("url", ["", "h:1", "https://h:1", "http://h", "http://h:99999"])
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="no address of a bootstrap server"):
        RankRegistration(url=url, register=registration())


def test_close_may_come_before_start() -> None:
    rank = RankRegistration(url="http://127.0.0.1:1", register=registration())
    rank.close()
    assert not rank.is_registered
