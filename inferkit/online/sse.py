"""Server-sent events, as every client of the OpenAI interface reads them."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferkit.online.errors import GenerationFailed, ServiceError

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it; it is for logs."""


class ClientGone(Exception):
    """Nobody reads the answer any more."""


def event(data: dict[str, Any]) -> bytes:
    """One event. Only ASCII: some clients take other characters for ends of lines."""
    return f"data: {json.dumps(data, allow_nan=False)}\n\n".encode()


class EventStream(Response):
    """Sends each event in one write, and stops as soon as the client is gone.

    A stream that fails ends with an error event and without the end of its body: a clean end
    would be taken for success.

    Args:
        head: the first event, which proved that there is something to stream.
        rest: the others.
        on_close: called at the end, whatever it is.
    """

    media_type = "text/event-stream"

    def __init__(
        self, head: bytes, rest: AsyncIterator[bytes], *, on_close: Callable[[], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.head = head
        self.rest = rest
        self.on_close = on_close
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _until_gone(receive, self._send_events(send))
        except ClientGone:
            logger.debug("a client left in the middle of its stream")
        finally:
            self.on_close()

    async def _send_events(self, send: Send) -> None:
        async def write(data: bytes, *, is_last: bool = False) -> None:
            message = {"type": "http.response.body", "body": data, "more_body": not is_last}
            await send(message)

        try:
            await write(self.head)
            async for data in self.rest:
                await write(data)
        except ServiceError as error:
            await write(event(error.body))
            return
        except Exception:
            logger.exception("a stream failed")
            await write(event(GenerationFailed("internal error; see the log of the server").body))
            return
        await write(b"", is_last=True)


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
        ClientGone: it left.
    """
    return await _until_gone(request.receive, work)


async def _until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
