"""One half of a request, as the router sees it: a POST whose answer is a stream of outputs.

The connection is the request: closing it cancels, and a cancel cannot overtake what it cancels.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import msgspec

from inferkit.core.messages import DECODE_ERRORS, Generate, Output, encode
from inferkit.online.facts import InstanceFacts
from inferkit.online.leg_frames import LEG_PATH, FrameError, FrameReader
from inferkit.online.router.routed_request import Fault, LegFailure
from inferkit.online.router_signature import RouterSignatures

CONNECT_LIMIT_S = 5.0
SEND_LIMIT_S = 30.0
KEEP_ALIVE_S = 2.0
"""Less than a server waits, so that it is never the server that closes a connection in use."""
END_LIMIT_S = 1.0
"""After its last output a body ends at once; then the connection serves another leg."""
MAX_ERROR_LEN = 2000
_FAULTS = {400: Fault.REFUSED, 413: Fault.REFUSED, 409: Fault.CONFLICT, 503: Fault.UNAVAILABLE}
AWAY_CODES = frozenset({"other_epoch", "draining", "unknown_bootstrap"})
"""Codes of a 503 that say: not here; nothing is broken."""


class LegFailed(Exception):
    def __init__(self, failure: LegFailure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class LegClient:
    """Opens legs; one for all requests of a router. `close` ends it."""

    def __init__(self, *, signatures: RouterSignatures | None = None) -> None:
        self.signatures = signatures or RouterSignatures()
        # No proxy of the environment comes between instances, and no limit: the instances have one.
        # They speak plain HTTP, so no certificates are loaded.
        self._http = httpx.AsyncClient(
            trust_env=False,
            verify=False,
            timeout=httpx.Timeout(None, connect=CONNECT_LIMIT_S, write=SEND_LIMIT_S),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEP_ALIVE_S
            ),
        )
        self._decoder: msgspec.msgpack.Decoder[Output] = msgspec.msgpack.Decoder(Output)

    async def close(self) -> None:
        await self._http.aclose()

    async def outputs(
        self, instance: InstanceFacts, message: Generate
    ) -> AsyncGenerator[Output, None]:
        """Outputs of a leg, the last one with a finish reason. Closing the iterator cancels it.

        Raises:
            LegFailed: it was refused, or ended before its end.
        """
        body = encode(message)
        headers = self.signatures.headers("POST", LEG_PATH, body)
        request = self._http.stream(
            "POST",
            f"{instance.url}{LEG_PATH}",
            content=body,
            headers={"content-type": "application/msgpack", **headers},
        )
        is_over = False
        try:
            async with request as response:
                if response.status_code != 200:
                    raise LegFailed(_refusal(response.status_code, await response.aread()))
                reader = FrameReader()
                chunks = response.aiter_raw()
                async for chunk in chunks:
                    for frame in reader.feed(chunk):
                        output = self._read(frame, instance, message)
                        is_over = output.finish_reason is not None
                        yield output
                    if is_over:
                        break
                if is_over:
                    await _drain(chunks)
                    return
        except (httpx.HTTPError, FrameError) as error:
            if not is_over:
                raise LegFailed(LegFailure(Fault.BROKEN, _text_of(error))) from error
            return
        raise LegFailed(LegFailure(Fault.BROKEN, "it has closed the connection too early"))

    def _read(self, frame: bytes, instance: InstanceFacts, message: Generate) -> Output:
        try:
            output = self._decoder.decode(frame)
        except DECODE_ERRORS as error:
            raise LegFailed(
                LegFailure(Fault.BROKEN, f"it has answered nonsense: {error}")
            ) from None
        expected = (instance.peer, message.epoch, message.key)
        if ((output.instance_id, output.epoch), output.peer_epoch, output.key) != expected:
            detail = f"it has answered for another request: room and attempt {output.key}"
            raise LegFailed(LegFailure(Fault.BROKEN, detail))
        return output


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_LIMIT_S):
            async for _ in chunks:
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


def _text_of(error: Exception) -> str:
    """Some exceptions of the HTTP client have no text."""
    return f"{error} ({type(error).__name__})" if str(error) else type(error).__name__
