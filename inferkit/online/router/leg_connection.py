"""A connection to an instance: one POST after the other, each answered by a body in pieces.

A leg is cancelled by closing its connection, at any moment, for certain and at once. General HTTP
clients keep connections in a pool of their own and lose some when the task that uses them is
cancelled; the request would go on at the instance. So this is the part of HTTP/1.1 that legs need.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, Iterator, Mapping

CONNECT_LIMIT_S = 5.0
SEND_LIMIT_S = 30.0
MAX_HEAD_BYTES = 64 << 10
PIECE_BYTES = 64 << 10
MAX_CHUNK_BYTES = 32 << 20
"""More than a frame; a server chooses how much is one chunk."""


class ConnectionBroken(Exception):
    """There is no connection, or what comes over it is not HTTP."""


class LegConnection:
    """Open it with `open`; `close` may be called in every state and never waits."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.is_reusable = False
        """The last answer has been read to its end, and the server keeps the connection."""
        self.idle_since_s = 0.0
        self._reader = reader
        self._writer = writer
        self._headers: Mapping[str, str] = {}

    @classmethod
    async def open(cls, host: str, port: int) -> "LegConnection":
        """Raises:
        ConnectionBroken: nobody listens there, or nobody answers.
        """
        with _telling():
            async with asyncio.timeout(CONNECT_LIMIT_S):
                reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD_BYTES)
        return cls(reader, writer)

    @property
    def is_usable(self) -> bool:
        """It may take another request: nothing has come, not even its end."""
        return self.is_reusable and not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        self.is_reusable = False
        self._writer.transport.abort()

    async def post(self, host: str, path: str, body: bytes, headers: Mapping[str, str]) -> int:
        """Send a request; returns the status of its answer, whose body is read by `pieces`.

        Raises:
            ConnectionBroken: there is no answer.
        """
        self.is_reusable = False
        lines = [f"POST {path} HTTP/1.1", f"host: {host}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode("ascii")
        with _telling():
            self._writer.write(head + body)
            async with asyncio.timeout(SEND_LIMIT_S):
                await self._writer.drain()
            status_line, *fields = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            version, status, *_ = status_line.split(b" ")
            if not version.startswith(b"HTTP/1."):
                raise ValueError(f"{version[:20]!r} is not HTTP/1")
            pairs = [field.decode("latin-1").partition(":") for field in fields if field]
            self._headers = {name.lower(): value.strip() for name, _, value in pairs}
            return int(status)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes.

        Raises:
            ConnectionBroken: it ends before its end.
        """
        with _telling():
            if self._headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                    if size > MAX_CHUNK_BYTES:
                        raise ValueError(f"a piece of {size} bytes; allowed are {MAX_CHUNK_BYTES}")
                    yield (await self._reader.readexactly(size + 2))[:-2]
                while await self._reader.readuntil(b"\r\n") != b"\r\n":
                    continue  # trailers
            elif "content-length" in self._headers:
                left = int(self._headers["content-length"])
                while left:
                    piece = await self._reader.read(min(left, PIECE_BYTES))
                    if not piece:
                        raise asyncio.IncompleteReadError(b"", left)
                    left -= len(piece)
                    yield piece
            else:
                while piece := await self._reader.read(PIECE_BYTES):
                    yield piece
                return
        self.is_reusable = self._headers.get("connection", "").lower() != "close"


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise ConnectionBroken("no answer in time") from None
    except asyncio.IncompleteReadError:
        raise ConnectionBroken("the connection was closed too early") from None
    except OSError as error:
        is_of_system = bool(error.errno) and not isinstance(error, socket.gaierror)
        text = os.strerror(error.errno or 0) if is_of_system else str(error)
        raise ConnectionBroken(text) from error
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise ConnectionBroken(f"the answer is no HTTP: {error}") from error
