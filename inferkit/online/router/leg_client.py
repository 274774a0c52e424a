"""One half of a request, as the router sees it: a POST whose answer is a stream of outputs.

The connection is the request: closing it cancels, and a cancel cannot overtake what it cancels.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from inferkit.core.messages import DECODE_ERRORS, Generate, Output, encode
from inferkit.core.protocols import Clock
from inferkit.online.facts import InstanceFacts
from inferkit.online.leg_frames import LEG_PATH, FrameError, FrameReader
from inferkit.online.router.leg_connection import ConnectionBroken, LegConnection
from inferkit.online.router.routed_request import Fault, LegFailure
from inferkit.online.router_signature import RouterSignatures

KEEP_ALIVE_S = 2.0
"""Less than a server waits, so that it is never the server that closes a connection in use."""
MAX_IDLE = 64
"""Connections per instance that wait for the next leg."""
END_LIMIT_S = 1.0
"""After its last output a body ends at once; then the connection serves another leg."""
MAX_ERROR_LEN = 2000
MAX_ERROR_BYTES = 64 << 10
_FAULTS = {400: Fault.REFUSED, 413: Fault.REFUSED, 409: Fault.CONFLICT, 503: Fault.UNAVAILABLE}
AWAY_CODES = frozenset({"other_epoch", "draining", "unknown_bootstrap"})
"""Codes of a 503 that say: not here; nothing is broken."""


class LegFailed(Exception):
    def __init__(self, failure: LegFailure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class LegClient:
    """Opens legs; one for all requests of a router. `close` ends connections that wait."""

    def __init__(self, *, clock: Clock, signatures: RouterSignatures | None = None) -> None:
        self.clock = clock
        self.signatures = signatures or RouterSignatures()
        self.num_open = 0
        """Connections that run a leg now."""
        self._idle: dict[str, list[LegConnection]] = {}
        self._decoder: msgspec.msgpack.Decoder[Output] = msgspec.msgpack.Decoder(Output)

    def close(self) -> None:
        self._close_idle(lambda connection: True)

    def prune(self) -> None:
        """Close connections that have waited too long; called now and then."""
        self._close_idle(lambda connection: not self._is_fresh(connection))

    async def outputs(
        self, instance: InstanceFacts, message: Generate
    ) -> AsyncGenerator[Output, None]:
        """Outputs of a leg, the last one with a finish reason. Closing the iterator cancels it.

        Raises:
            LegFailed: it was refused, or ended before its end.
        """
        connection = None
        is_over = False
        self.num_open += 1
        try:
            connection = self._take(instance.url) or await _connect(instance.url)
            status = await self._post(connection, instance, message)
            async with contextlib.aclosing(connection.pieces()) as pieces:
                if status != 200:
                    raise LegFailed(_refusal(status, await _whole(pieces)))
                reader = FrameReader()
                async for piece in pieces:
                    for frame in reader.feed(piece):
                        output = self._read(frame, instance, message)
                        is_over = is_over or output.finish_reason is not None
                        yield output
                    if is_over:
                        break
                if not is_over:
                    raise LegFailed(LegFailure(Fault.BROKEN, "it has ended without an end"))
                await _drain(pieces)
        except (ConnectionBroken, FrameError) as error:
            if not is_over:
                raise LegFailed(LegFailure(Fault.BROKEN, str(error))) from error
        finally:
            self.num_open -= 1
            if connection is not None:
                self._put_back(instance.url, connection)

    async def _post(
        self, connection: LegConnection, instance: InstanceFacts, message: Generate
    ) -> int:
        body = encode(message)
        headers = {"content-type": "application/msgpack"}
        headers |= self.signatures.headers("POST", LEG_PATH, body)
        return await connection.post(urlsplit(instance.url).netloc, LEG_PATH, body, headers)

    def _read(self, frame: bytes, instance: InstanceFacts, message: Generate) -> Output:
        try:
            output = self._decoder.decode(frame)
        except DECODE_ERRORS as error:
            detail = f"it has answered nonsense: {error}"
            raise LegFailed(LegFailure(Fault.BROKEN, detail)) from None
        expected = (instance.peer, message.epoch, message.key)
        if ((output.instance_id, output.epoch), output.peer_epoch, output.key) != expected:
            detail = f"it has answered for another request: room and attempt {output.key}"
            raise LegFailed(LegFailure(Fault.BROKEN, detail))
        return output

    # -- connections that wait -----------------------------------------------------------------

    def _take(self, url: str) -> LegConnection | None:
        connections = self._idle.get(url, [])
        while connections:
            connection = connections.pop()
            if self._is_fresh(connection):
                return connection
            connection.close()
        return None

    def _put_back(self, url: str, connection: LegConnection) -> None:
        """Keep a connection whose leg has ended well; close any other."""
        if not connection.is_usable:
            connection.close()
            return
        connection.idle_since_s = self.clock()
        connections = self._idle.setdefault(url, [])
        connections.append(connection)
        if len(connections) > MAX_IDLE:
            connections.pop(0).close()

    def _is_fresh(self, connection: LegConnection) -> bool:
        return connection.is_usable and self.clock() - connection.idle_since_s < KEEP_ALIVE_S

    def _close_idle(self, is_over: Callable[[LegConnection], bool]) -> None:
        for url, connections in list(self._idle.items()):
            for connection in [entry for entry in connections if is_over(entry)]:
                connections.remove(connection)
                connection.close()
            if not connections:
                del self._idle[url]


async def _connect(url: str) -> LegConnection:
    parts = urlsplit(url)
    return await LegConnection.open(parts.hostname or "", parts.port or 80)


async def _whole(pieces: AsyncGenerator[bytes, None]) -> bytes:
    body = b""
    async for piece in pieces:
        body += piece
        if len(body) > MAX_ERROR_BYTES:
            raise ConnectionBroken("its refusal has no end")
    return body


async def _drain(pieces: AsyncGenerator[bytes, None]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_LIMIT_S):
            async for _ in pieces:
                pass


def _refusal(status: int, body: bytes) -> LegFailure:
    """From an answer in the form of `errors.ServiceError`."""
    try:
        error: Any = msgspec.json.decode(body)["error"]
        text, code = str(error["message"]), error.get("code")
    except (*DECODE_ERRORS, KeyError, TypeError, AttributeError):
        text, code = body[:200].decode("utf-8", "replace"), None
    fault = _FAULTS.get(status, Fault.BROKEN)
    if fault is Fault.BROKEN:
        text = f"HTTP status {status}: {text}"
    if fault is Fault.UNAVAILABLE and code in AWAY_CODES:
        fault = Fault.AWAY
    return LegFailure(fault, text[:MAX_ERROR_LEN])
