"""The HTTP interface of a bootstrap server, on a port of its own beside that of an instance.

    PUT  /bootstrap/register_rank      a prefill rank says where it receives (Register, as JSON)
    GET  /bootstrap/route              where all ranks are; 503 until every one has registered
    POST /bootstrap/register_dp_rank   which set of ranks computes a room
    POST /bootstrap/query_dp_ranks     the same, asked
    GET  /bootstrap/health             the instance lives; whether a route can be had

With a secret, everything but /health must be signed, and every answer is. Numbers of 64 bits
travel as JSON integers: every reader is one of ours. The address of a rank is tried once before it
is believed, so a wrong one is told where it can be corrected and not by requests that hang.
"""

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from inferkit.core.messages import DECODE_ERRORS
from inferkit.core.protocols import Clock
from inferkit.core.transfer_messages import Register
from inferkit.kv_transfer.route import HEALTH_PATH, MAX_BODY_BYTES, REGISTER_PATH, ROUTE_PATH
from inferkit.kv_transfer.signature import HttpSignatures
from inferkit.online.bootstrap_table import MAX_QUERIED_ROOMS, BootstrapTable
from inferkit.online.errors import BadRequest, ServiceError, TooLarge
from inferkit.online.http_server import http_server
from inferkit.online.instance import Instance

REACH_TIMEOUT_S = 2.0


class Unsigned(ServiceError):
    """The caller does not prove that it knows the secret."""

    status = 401
    kind = "authentication_error"


class DPRankBody(msgspec.Struct, forbid_unknown_fields=True):
    bootstrap_room: int
    dp_rank: int


class RoomsBody(msgspec.Struct, forbid_unknown_fields=True):
    bootstrap_rooms: Annotated[list[int], msgspec.Meta(max_length=MAX_QUERIED_ROOMS)]


B = TypeVar("B")
Work: TypeAlias = Callable[[bytes], Awaitable[Any]]
"""Body of a request -> what to answer."""


def make_bootstrap_app(
    table: BootstrapTable, *, secret: bytes = b"", tries_addresses: bool = True
) -> FastAPI:
    """The application; it shares the event loop of its instance.

    Args:
        secret: shared by all instances; empty = nothing is signed (loopback only).
        tries_addresses: a rank that cannot be connected to from here is refused.
    """
    app = FastAPI(title="inferkit bootstrap", docs_url=None, redoc_url=None, openapi_url=None)
    signatures = HttpSignatures(secret=secret)

    async def answer(request: Request, work: Work, *, signed: bool) -> Response:
        path = request.url.path
        status = 200
        headers: Mapping[str, str] = {}
        try:
            body = await _body(request)
            given = request.headers.get(HttpSignatures.HEADER, "")
            if signed and not signatures.is_request_valid(given, request.method, path, body):
                raise Unsigned(
                    f"{HttpSignatures.HEADER}: this server takes only what is signed with its "
                    "secret; give all instances the same one (disagg.secret_env)"
                )
            result = await work(body)
        except ServiceError as error:
            status, headers, result = error.status, error.headers, error.body
        except ClientDisconnect:
            return Response()  # nobody reads it
        content = msgspec.json.encode(result)
        headers = {**headers, **signatures.answer_headers(path, status, content)}
        return Response(content, status, headers, media_type="application/json")

    def add(method: str, path: str, work: Work, *, signed: bool = True) -> None:
        async def endpoint(request: Request) -> Response:
            return await answer(request, work, signed=signed)

        app.add_api_route(path, endpoint, methods=[method])

    async def register_rank(body: bytes) -> Any:
        register = _decode(body, Register)
        table.check(register)
        if tries_addresses and not table.has_address(register):
            await _reach(register.rank_ip, register.rank_port)
        table.register(register)
        return {"status": "ok"}

    async def route(_: bytes) -> Any:
        return table.route()

    async def register_dp_rank(body: bytes) -> Any:
        given = _decode(body, DPRankBody)
        table.register_dp_rank(given.bootstrap_room, given.dp_rank)
        return {"status": "ok"}

    async def query_dp_ranks(body: bytes) -> Any:
        rooms = _decode(body, RoomsBody).bootstrap_rooms
        return {str(room): rank for room, rank in table.query_dp_ranks(rooms).items()}

    async def health(_: bytes) -> Any:
        return table.health()

    add("PUT", REGISTER_PATH, register_rank)
    add("GET", ROUTE_PATH, route)
    add("POST", "/bootstrap/register_dp_rank", register_dp_rank)
    add("POST", "/bootstrap/query_dp_ranks", query_dp_ranks)
    add("GET", HEALTH_PATH, health, signed=False)
    return app


async def _reach(host: str, port: int) -> None:
    """Connect once.

    Raises:
        BadRequest: it fails; a decode instance would fail as well.
    """
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, UnicodeError) as error:  # names that are none raise the latter
        cause = str(error) or f"nothing within {REACH_TIMEOUT_S:g} s"
        raise BadRequest(
            f"rank_ip={host!r} rank_port={port}: nobody can be connected to there from the node of "
            f"the bootstrap server ({cause}); give the ranks an address that other nodes reach "
            "(disagg.prefill_ips)",
            param="rank_ip",
        ) from error
    writer.close()


@contextlib.asynccontextmanager
async def bootstrap_server(
    instance: Instance,
    listener: socket.socket,
    *,
    register_interval_s: float,
    secret: bytes,
    clock: Clock = time.monotonic,
) -> AsyncIterator[None]:
    """Serves while the context is open, in the running event loop."""
    table = BootstrapTable(
        instance_id=instance.instance_id,
        epoch=instance.epoch,
        register_interval_s=register_interval_s,
        clock=clock,
    )
    async with http_server(make_bootstrap_app(table, secret=secret), listener):
        yield


async def _body(request: Request) -> bytes:
    """Raises:
    TooLarge: it is longer than any registration.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge(f"the body is longer than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _decode(body: bytes, kind: type[B]) -> B:
    """Raises:
    BadRequest: it is not of this kind; the field is named.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except DECODE_ERRORS as error:
        text = str(error)
        field = re.search(r"field `(\w+)`", text), re.search(r"`\$\.?([^`]*)`$", text)
        names = [found[1] for found in reversed(field) if found is not None and found[1]]
        name = ".".join(names)
        raise BadRequest(f"{name or 'body'}: {text}", param=name or None) from error
