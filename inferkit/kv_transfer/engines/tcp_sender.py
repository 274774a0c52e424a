"""The writer's end of a connection of the tcp engine."""

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from inferkit.core.protocols import WriteState
from inferkit.kv_transfer.engines.base import Write
from inferkit.kv_transfer.engines.copies import Bytes, are_small, gather
from inferkit.kv_transfer.engines.io_thread import IoThread
from inferkit.kv_transfer.engines.runs import LOCAL, REMOTE, Ints, expand, num_bytes
from inferkit.kv_transfer.engines.tcp_frames import (
    ANSWER,
    HEADER,
    HELLO,
    MAGIC,
    ROW,
    WELCOME,
    WHY,
    Header,
    Hello,
    Status,
)

TURN_BYTES = 8 << 20
"""Sent on one connection before the others of the thread have a turn."""
MAX_BUFFERS = 512
"""Runs that one system call sends; the system's own limit is 1024."""


@dataclass
class Part:
    """Some runs of a batch: one frame."""

    write: Write
    header: Header
    runs: Ints

    def buffers(self, regions: list[Bytes]) -> list[memoryview]:
        """The frame, in order."""
        table = self.runs[:, REMOTE].astype(ROW).tobytes()
        head = memoryview(HEADER.pack(*self.header) + table)
        places = self.runs[:, LOCAL]
        if are_small(places):
            return [head, gather(regions, places).data]
        pieces = expand(places).tolist()
        return [head, *(regions[region][start : start + n].data for region, start, n in pieces)]


def make_part(write: Write, runs: Ints, *, epoch: int, batch_id: int) -> Part:
    header = Header(epoch, write.transfer_id, batch_id, num_bytes(runs), len(runs))
    return Part(write, header, runs)


class Outgoing:
    """A connection to a receiver. `post` and `load` are for any thread, the rest for its IoThread.

    Args:
        hello: what the receiver must agree to before the first frame.
        regions: local memory, which parts are read from.
        timeout_s: a connection that neither sends nor hears anything for so long, with work to
            do, is closed.
    """

    def __init__(
        self,
        address: tuple[str, int],
        io: IoThread,
        *,
        hello: Hello,
        regions: list[Bytes],
        connect_timeout_s: float,
        timeout_s: float,
        on_close: Callable[[str], None],
    ) -> None:
        self.address = address
        self.io = io
        self.is_closed = False
        self._hello = hello
        self._regions = regions
        self._timeout_s = timeout_s
        self._on_close = on_close
        self._posted: deque[Part] = deque()
        self._num_posted_bytes = 0
        self._num_ended_bytes = 0
        self._post_lock = threading.Lock()
        self._unanswered: deque[Part] = deque()
        """Begun, in the order of their answers; the last one may still be on its way out."""
        self._buffers: list[memoryview] = []
        self._buffer = 0
        self._received = b""
        self._is_welcome = False
        self._is_last = False
        self._events = 0
        self._deadline_s = time.monotonic() + connect_timeout_s
        self.sock: socket.socket | None = None

    @property
    def load(self) -> int:
        """Bytes that were posted and have not ended."""
        return self._num_posted_bytes - self._num_ended_bytes

    def post(self, part: Part) -> None:
        with self._post_lock:
            self._num_posted_bytes += part.header.payload_bytes
            self._posted.append(part)
        self.io.call(self._pump)

    def start(self) -> None:
        if self.is_closed:
            return
        self.io.on_tick.add(self._on_tick)
        family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        sock = self.sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.connect(self.address)
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(f"no connection: {error}")
            return
        self._buffers = [memoryview(HELLO.pack(*self._hello))]
        self._watch(selectors.EVENT_READ | selectors.EVENT_WRITE)

    def finish(self) -> None:
        """Close as soon as all that was posted has been answered."""
        self._is_last = True
        self._close_if_done()

    def close(self, why: str) -> None:
        """Parts that have not begun fail; those that have are lost, for bytes may still land."""
        why = f"connection to {self.address[0]}:{self.address[1]}: {why}"
        if not self.is_closed:
            self.is_closed = True
            self.io.on_tick.discard(self._on_tick)
            if self.sock is not None:
                self.io.unwatch(self.sock)
                self.sock.close()
            self._on_close(why)
        while self._unanswered:
            self._unanswered.popleft().write.end_part(WriteState.LOST, why)
        while self._posted:
            self._posted.popleft().write.end_part(WriteState.FAILED, why)

    def _watch(self, events: int) -> None:
        assert self.sock is not None
        if events != self._events:
            self._events = events
            self.io.watch(self.sock, events, self._on_ready)

    def _on_tick(self) -> None:
        is_waiting = not self._is_welcome or self._unanswered or self._posted
        if is_waiting and time.monotonic() > self._deadline_s:
            self.close("the receiver does not answer")

    def _on_ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read()
            if events & selectors.EVENT_WRITE and not self.is_closed:
                self._pump()
        except OSError as error:
            self.close(str(error))

    def _read(self) -> None:
        assert self.sock is not None
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.close("the receiver has ended")
            return
        self._extend_deadline()
        self._received += data
        if not self._is_welcome:
            if len(self._received) < WELCOME.size:
                return
            self._on_welcome(*WELCOME.unpack(self._received[: WELCOME.size]))
            self._received = self._received[WELCOME.size :]
        end = len(self._received) // ANSWER.size * ANSWER.size
        for batch_id, status in ANSWER.iter_unpack(self._received[:end]):
            self._on_answer(batch_id, status)
        self._received = self._received[end:]
        self._close_if_done()

    def _on_welcome(self, magic: bytes, status: int) -> None:
        if magic != MAGIC:
            self.close("it is no tcp transfer engine")
        elif status != Status.OK:
            self.close(WHY.get(Status(status), f"refused with status {status}"))
        else:
            self._is_welcome = True
            self._pump()

    def _on_answer(self, batch_id: int, status: int) -> None:
        if self.is_closed:
            return
        if not self._unanswered or self._unanswered[0].header.batch_id != batch_id:
            self.close(f"an answer to batch {batch_id}, which it does not owe")
            return
        part = self._unanswered.popleft()
        self._num_ended_bytes += part.header.payload_bytes
        if status == Status.OK:
            part.write.end_part(WriteState.DONE)
        else:
            why = WHY[Status(status)] if status in WHY else f"refused with status {status}"
            part.write.end_part(WriteState.FAILED, why)

    def _pump(self) -> None:
        """Send until the socket takes no more, the turn is over or nothing is left."""
        if self.is_closed:
            self.close("the link was closed before")
            return
        total = 0
        try:
            while total < TURN_BYTES and self._next_buffers():
                num_offered, num_sent = self._send()
                total += num_sent
                if num_sent < num_offered:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(str(error))
            return
        if total:
            self._extend_deadline()
        has_more = bool(self._buffers) or (self._is_welcome and bool(self._posted))
        self._watch(selectors.EVENT_READ | (selectors.EVENT_WRITE if has_more else 0))

    def _next_buffers(self) -> bool:
        """Whether there is something to send now."""
        while not self._buffers and self._is_welcome and self._posted:
            part = self._posted.popleft()
            if part.write.is_cancelled:
                self._num_ended_bytes += part.header.payload_bytes
                part.write.end_part(WriteState.FAILED, "cancelled")
                continue
            if not self._unanswered:
                self._extend_deadline()
            self._unanswered.append(part)
            self._buffers, self._buffer = part.buffers(self._regions), 0
        return bool(self._buffers)

    def _send(self) -> tuple[int, int]:
        """Bytes that were offered, and taken by the socket."""
        assert self.sock is not None
        buffers = self._buffers
        offered = buffers[self._buffer : self._buffer + MAX_BUFFERS]
        num_sent = left = self.sock.sendmsg(offered)
        while left:
            length = len(buffers[self._buffer])
            if left < length:
                buffers[self._buffer] = buffers[self._buffer][left:]
                break
            left -= length
            self._buffer += 1
        if self._buffer == len(buffers):
            self._buffers = []
        return sum(map(len, offered)), num_sent

    def _extend_deadline(self) -> None:
        self._deadline_s = time.monotonic() + self._timeout_s

    def _close_if_done(self) -> None:
        if self._is_last and not (self._posted or self._unanswered or self._buffers):
            self.close("no longer needed")
