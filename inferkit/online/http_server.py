"""One HTTP server in a running event loop, for any application."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

CLOSE_CONNECTIONS_S = 5


@contextlib.asynccontextmanager
async def http_server(app: ASGIApp, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """Answers while the context is open; at its end, answers that are under way may go out.

    Yields the task that serves; it ends only where the server fails.
    """
    quiet_uvicorn()
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=CLOSE_CONNECTIONS_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield serving
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the owner of the process."""
        yield


class _NoBrokenBodies(logging.Filter):
    """A body that is left without its end is how a stream fails (see `sse`)."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in record.getMessage()


def quiet_uvicorn() -> None:
    """Its messages of every start and stop are not ours to show."""
    logger_of_uvicorn = logging.getLogger("uvicorn.error")
    logger_of_uvicorn.setLevel(logging.WARNING)
    if not any(isinstance(known, _NoBrokenBodies) for known in logger_of_uvicorn.filters):
        logger_of_uvicorn.addFilter(_NoBrokenBodies())
