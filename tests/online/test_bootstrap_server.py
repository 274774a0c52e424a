"""The five endpoints over HTTP."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn

from inferkit.kv_transfer import route as routes
from inferkit.kv_transfer.signature import HttpSignatures
from inferkit.online.bootstrap_server import make_bootstrap_app
from inferkit.online.bootstrap_table import BootstrapTable
from tests.kv_transfer.bootstrap import full_table, layout, listening, registration, table, url_of

REGISTER, ROUTE = "/bootstrap/register_rank", "/bootstrap/route"
HEALTH = "/bootstrap/health"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@asynccontextmanager
async def asking(known: BootstrapTable, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = make_bootstrap_app(known, **({"tries_addresses": False} | options))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def test_ranks_register_and_the_route_is_served() -> None:
    async def work() -> None:
        async with asking(table(epoch=2**64 - 1)) as client:
            assert (await client.get(ROUTE)).status_code == 503
            for rank in range(2):
                given = registration(rank, epoch=2**64 - 1, layout=layout(tp=2))
                answer = await client.put(REGISTER, content=msgspec.json.encode(given))
                assert answer.status_code == 200
            answer = await client.get(ROUTE)
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["epoch"] == 2**64 - 1
            assert answer.json()["ranks"]["0,0,1"]["rank_port"] == 7001
            assert routes.read_route(answer.content).is_complete
            health = (await client.get(HEALTH)).json()
            assert health["status"] == "ok" and health["ready"]
            assert (health["instance_id"], health["epoch"]) == ("p", 2**64 - 1)

    run(work())


def test_a_route_that_is_not_complete_says_what_is_missing() -> None:
    async def work() -> None:
        known = table()
        known.register(registration(1, layout=layout(tp=4)))
        async with asking(known) as client:
            answer = await client.get(ROUTE)
            assert answer.status_code == 503
            assert "1 of 4" in answer.json()["error"]["message"]
            assert "0, 2, 3" in answer.json()["error"]["message"]
            assert "retry-after" in answer.headers
            assert (await client.get(HEALTH)).json()["ready"] is False

    run(work())


def test_another_life_gets_409_and_both_values() -> None:
    async def work() -> None:
        async with asking(table()) as client:
            answer = await client.put(REGISTER, content=msgspec.json.encode(registration(epoch=2)))
            assert answer.status_code == 409
            error = answer.json()["error"]
            assert error["param"] == "epoch"
            assert "epoch=2" in error["message"] and " 1;" in error["message"]

    run(work())


def without(field: str) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.pop(field)


def having(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(values)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (without("rank"), "rank"),
        (without("layout"), "layout"),
        (having(rank_port=0), "rank_port"),
        (having(rank_port="7000"), "rank_port"),
        (having(rank=-1), "rank"),
        (having(rank=True), "rank"),
        (having(epoch=-1), "epoch"),
        (having(epoch=1.5), "epoch"),
        (having(colour="red"), "colour"),
        (having(kind="generate"), "kind"),
        (having(rank_ip="x" * 300), "rank_ip"),
        (lambda body: body["layout"].pop("model"), "layout.model"),
        (lambda body: body["layout"]["layers"][0].update(dims=[0]), "layout.layers[0].dims[0]"),
        (lambda body: body["layout"].update(layers=5), "layout.layers"),
    ],
)
def test_a_malformed_registration_is_400_and_names_the_field(
    change: Callable[[dict[str, Any]], None], field: str
) -> None:
    async def work() -> None:
        body = msgspec.json.decode(msgspec.json.encode(registration()))
        change(body)
        async with asking(table()) as client:
            answer = await client.put(REGISTER, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == field
            assert not (await client.get(HEALTH)).json()["ready"]

    run(work())


@pytest.mark.parametrize("path", ["register_dp_rank", "query_dp_ranks"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 10_000, b'{"a":' * 10_000, b"{}"]
)
def test_bodies_that_are_nothing_are_400(path: str, body: bytes) -> None:
    async def work() -> None:
        async with asking(table()) as client:
            answer = await client.post(f"/bootstrap/{path}", content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"]

    run(work())


def test_bytes_that_were_damaged_never_break_the_server() -> None:
    async def work() -> None:
        draw = random.Random(5)
        whole = msgspec.json.encode(registration(layout=layout(tp=2)))
        async with asking(table()) as client:
            for _ in range(500):
                body = bytearray(whole)
                for _ in range(draw.randrange(1, 4)):
                    place = draw.randrange(len(body))
                    if draw.random() < 0.5:
                        body[place] = draw.randrange(256)
                    else:
                        del body[place : place + draw.randrange(1, 30)]
                answer = await client.put(REGISTER, content=bytes(body))
                assert answer.status_code in (200, 400, 409)
            assert (await client.get(HEALTH)).status_code == 200

    run(work())


def test_a_body_has_a_limit() -> None:
    async def work() -> None:
        async with asking(table()) as client:
            big = b" " * (routes.MAX_BODY_BYTES + 1)
            answer = await client.put(REGISTER, content=big)
            assert answer.status_code == 413
            assert answer.json()["error"]["message"]

    run(work())


def test_dp_ranks_of_rooms_are_registered_and_asked() -> None:
    async def work() -> None:
        known = table()
        for rank in range(2):
            known.register(registration(rank, layout=layout(dp=2)))
        async with asking(known) as client:
            room = 2**63 - 1
            told = {"bootstrap_room": room, "dp_rank": 0}
            answer = await client.post("/bootstrap/register_dp_rank", json=told)
            assert answer.status_code == 200
            asked = {"bootstrap_rooms": [room, 3, 4]}
            answer = await client.post("/bootstrap/query_dp_ranks", json=asked)
            assert answer.json() == {str(room): 0, "3": 1, "4": 0}
            told = {"bootstrap_room": 1, "dp_rank": 2}
            answer = await client.post("/bootstrap/register_dp_rank", json=told)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "dp_rank"
            asked = {"bootstrap_rooms": list(range(1, 5000))}
            answer = await client.post("/bootstrap/query_dp_ranks", json=asked)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "bootstrap_rooms"

    run(work())


def test_with_a_secret_everything_but_health_is_signed() -> None:
    async def work() -> None:
        secret = b"s" * 16
        ours, others = HttpSignatures(secret=secret), HttpSignatures(secret=b"other")
        body = msgspec.json.encode(registration())
        async with asking(table(), secret=secret) as client:
            for signer in (HttpSignatures(secret=b""), others):
                headers = signer.request_headers("PUT", REGISTER, body)
                answer = await client.put(REGISTER, content=body, headers=headers)
                assert answer.status_code == 401
                headers = signer.request_headers("GET", ROUTE)
                assert (await client.get(ROUTE, headers=headers)).status_code == 401
            headers = ours.request_headers("PUT", REGISTER, body)
            other = msgspec.json.encode(registration(rank_port=1))
            answer = await client.put(REGISTER, content=other, headers=headers)
            assert answer.status_code == 401, "the signature is of another body"
            answer = await client.put(REGISTER, content=body, headers=headers)
            assert answer.status_code == 200
            answer = await client.get(ROUTE, headers=ours.request_headers("GET", ROUTE))
            assert answer.status_code == 200
            given = answer.headers[HttpSignatures.HEADER]
            assert ours.is_answer_valid(given, ROUTE, 200, answer.content)
            assert not ours.is_answer_valid(given, ROUTE, 200, answer.content + b" ")
            assert not others.is_answer_valid(given, ROUTE, 200, answer.content)
            answer = await client.get(HEALTH)
            given = answer.headers[HttpSignatures.HEADER]
            assert answer.status_code == 200
            assert ours.is_answer_valid(given, HEALTH, 200, answer.content)

    run(work())


def test_what_does_not_exist_is_404() -> None:
    async def work() -> None:
        async with asking(table()) as client:
            assert (await client.get("/bootstrap/other")).status_code == 404
            assert (await client.get(REGISTER)).status_code == 405
            assert (await client.get("/docs")).status_code == 404

    run(work())


def test_the_address_of_a_rank_is_tried_before_it_is_believed() -> None:
    async def work() -> None:
        with listening() as listener:
            port = listener.getsockname()[1]
            known = table()
            given = registration(rank_port=port)
            async with asking(known, tries_addresses=True) as client:
                answer = await client.put(REGISTER, content=msgspec.json.encode(given))
                assert answer.status_code == 200 and known.is_ready
                listener.settimeout(5)
                listener.accept()[0].close()
                listener.settimeout(0)
                answer = await client.put(REGISTER, content=msgspec.json.encode(given))
                assert answer.status_code == 200
                with pytest.raises(BlockingIOError):  # once is enough
                    listener.accept()
            async with asking(table(), tries_addresses=True) as client:
                foreign = registration(epoch=9, rank_port=port)
                answer = await client.put(REGISTER, content=msgspec.json.encode(foreign))
                assert answer.status_code == 409
                with pytest.raises(BlockingIOError):  # strangers send nobody anywhere
                    listener.accept()
        for host in ("127.0.0.1", "x" * 200):
            known = table()
            given = registration(rank_ip=host, rank_port=port)
            async with asking(known, tries_addresses=True) as client:
                answer = await client.put(REGISTER, content=msgspec.json.encode(given))
                assert answer.status_code == 400 and not known.is_ready
                error = answer.json()["error"]
                assert error["param"] == "rank_ip" and host in error["message"]

    run(work())


def test_a_bootstrap_server_lives_in_the_event_loop_of_another_server() -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"other"})

    async def work() -> None:
        bootstrap = make_bootstrap_app(full_table())
        with listening() as first, listening() as second:
            servers = [
                (uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off")), listener)
                for app, listener in ((other, first), (bootstrap, second))
            ]
            serving = [
                asyncio.create_task(server.serve(sockets=[listener]))
                for server, listener in servers
            ]
            async with httpx.AsyncClient(trust_env=False) as client:
                assert (await client.get(url_of(first))).text == "other"
                answer = await client.get(url_of(second) + ROUTE)
                assert routes.read_route(answer.content).is_complete
            for server, _ in servers:
                server.should_exit = True
            await asyncio.gather(*serving)

    run(work())
