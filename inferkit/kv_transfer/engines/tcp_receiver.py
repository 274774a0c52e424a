"""The receiver's end of a connection of the tcp engine: it copies bytes into registered memory."""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from inferkit.kv_transfer.engines.base import OpenTransfers
from inferkit.kv_transfer.engines.copies import Bytes, are_small, scatter
from inferkit.kv_transfer.engines.io_thread import IoThread
from inferkit.kv_transfer.engines.runs import Ints, expand, first_outside
from inferkit.kv_transfer.engines.tcp_frames import (
    ANSWER,
    HEADER,
    HELLO,
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_FRAME_RUNS,
    ROW,
    ROW_COLUMNS,
    WELCOME,
    Header,
    Hello,
    Status,
)

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 1 << 18
TURN_BYTES = 8 << 20
"""Read from one connection before the others of the thread have a turn."""
MAX_BUFFERS = 512
"""Runs that one system call fills; the system's own limit is 1024."""
LOW_WATER_BYTES = 512 << 10
"""Woken for less than this only at the end of a payload: each time costs both sides of the copy."""
HELLO_TIMEOUT_S = 10.0


class Memory(Protocol):
    """What of an engine a connection needs."""

    epoch: int
    sizes: Ints
    arrays: list[Bytes]
    open_transfers: OpenTransfers


class Staged(NamedTuple):
    """Small runs: their bytes are collected, and go to their places together."""

    places: Ints
    data: Bytes


class Incoming:
    """A connection that a writer opened. All methods but `pass_copy` belong to its IoThread."""

    def __init__(
        self, sock: socket.socket, io: IoThread, memory: Memory, on_end: Callable[[], None]
    ) -> None:
        self.sock = sock
        self.io = io
        self.memory = memory
        self.is_closed = False
        self._on_end = on_end
        self._copying = threading.Lock()
        """Held while bytes of a transfer that was seen open go into memory."""
        self._hello_end_s = time.monotonic() + HELLO_TIMEOUT_S
        self._next = self._on_hello
        self._part = bytearray(HELLO.size)
        self._num_read = 0
        self._header: Header | None = None
        self._status = Status.OK
        self._targets: list[memoryview] = []
        self._target = 0
        self._staged: Staged | None = None
        self._num_left = 0
        self._low_water = 1
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._answers = b""
        self._events = selectors.EVENT_READ

    def start(self) -> None:
        self.io.watch(self.sock, self._events, self._on_ready)
        self.io.on_tick.add(self._on_tick)

    def close(self, why: str) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        logger.debug("tcp connection closed: %s", why)
        self.io.on_tick.discard(self._on_tick)
        self.io.unwatch(self.sock)
        self.sock.close()
        self._on_end()

    def pass_copy(self) -> None:
        """Return when no copy that began before this call is going on; from any thread."""
        with self._copying:
            pass

    def _on_tick(self) -> None:
        if self._next == self._on_hello and time.monotonic() > self._hello_end_s:
            self.close("it did not say hello")

    def _on_ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send_answers()
            if events & selectors.EVENT_READ:
                self._read()
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))

    def _read(self) -> None:
        """Read until nothing is left or the turn is over. Raises BlockingIOError and OSError."""
        total = 0
        while total < TURN_BYTES and not self.is_closed:
            is_payload = self._next == self._on_payload
            if is_payload:
                num_asked, num_bytes = self._read_payload()
                self._num_left -= num_bytes
                is_complete = not self._num_left
                self._set_low_water()
            else:
                num_asked = len(self._part) - self._num_read
                num_bytes = self.sock.recv_into(memoryview(self._part)[self._num_read :])
                self._num_read += num_bytes
                is_complete = num_bytes == num_asked
            if not num_bytes:
                self.close("the writer has ended")
            elif is_complete:
                self._next()
            elif num_bytes < num_asked:
                return
            total += num_bytes

    def _expect(self, num_bytes: int, then: Callable[[], None]) -> None:
        self._part, self._num_read, self._next = bytearray(num_bytes), 0, then

    def _on_hello(self) -> None:
        hello = Hello(*HELLO.unpack(self._part))
        if hello.magic != MAGIC:
            self.close("it speaks another language")
            return
        is_ours = hello.epoch == self.memory.epoch
        status = Status.OK if is_ours else Status.OTHER_EPOCH
        self._answer(WELCOME.pack(MAGIC, status))
        if not is_ours:
            self.close(f"it is meant for epoch {hello.epoch}")
            return
        self._expect(HEADER.size, self._on_header)

    def _on_header(self) -> None:
        header = Header(*HEADER.unpack(self._part))
        if (
            header.epoch != self.memory.epoch
            or not 0 < header.num_runs <= MAX_FRAME_RUNS
            or not 0 < header.payload_bytes <= MAX_FRAME_BYTES
        ):
            self.close(f"a bad frame: {header}")
            return
        self._header = header
        self._expect(header.num_runs * ROW_COLUMNS * ROW.itemsize, self._on_table)

    def _on_table(self) -> None:
        header = self._header
        assert header is not None
        places = np.frombuffer(self._part, dtype=ROW).astype(np.int64).reshape(-1, ROW_COLUMNS)
        # A frame that is refused is read to its end, so that those behind it are understood.
        self._num_left = header.payload_bytes
        self._next = self._on_payload
        self._set_low_water()
        self._status = Status.OK
        self._targets, self._target, self._staged = [], 0, None
        if first_outside(places, self.memory.sizes) is not None:
            self._status = Status.OUT_OF_BOUNDS
            return
        if int((places[:, 2] * places[:, 3]).sum()) != header.payload_bytes:
            self.close(f"a bad frame: its runs do not have {header.payload_bytes} bytes")
            return
        if are_small(places):
            self._staged = Staged(places, np.empty(header.payload_bytes, np.uint8))
            self._targets = [self._staged.data.data]
            return
        arrays = self.memory.arrays
        pieces = expand(places).tolist()
        self._targets = [arrays[region][start : start + n].data for region, start, n in pieces]

    def _set_low_water(self) -> None:
        low_water = LOW_WATER_BYTES if self._num_left >= LOW_WATER_BYTES else 1
        if low_water != self._low_water:
            self._low_water = low_water
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def _read_payload(self) -> tuple[int, int]:
        """Bytes that were asked for, and read."""
        assert self._header is not None
        if self._staged is not None:
            return self._fill_targets()
        if self._status is Status.OK:
            # A fence drops the id and then passes the lock: after it this branch is not taken.
            with self._copying:
                if self._header.transfer_id in self.memory.open_transfers:
                    return self._fill_targets()
            self._status = Status.NOT_OPEN
        num_asked = min(self._num_left, SCRATCH_BYTES)
        return num_asked, self.sock.recv_into(self._scratch[:num_asked])

    def _fill_targets(self) -> tuple[int, int]:
        targets = self._targets
        if self._target == len(targets) - 1:
            num_asked = len(targets[self._target])
            num_bytes = self.sock.recv_into(targets[self._target])
        else:
            buffers = targets[self._target : self._target + MAX_BUFFERS]
            num_asked = sum(map(len, buffers))
            num_bytes = self.sock.recvmsg_into(buffers)[0]
        left = num_bytes
        while left:
            length = len(targets[self._target])
            if left < length:
                targets[self._target] = targets[self._target][left:]
                break
            left -= length
            self._target += 1
        return num_asked, num_bytes

    def _on_payload(self) -> None:
        assert self._header is not None
        if self._status is Status.OK:
            with self._copying:
                if self._header.transfer_id not in self.memory.open_transfers:
                    # It may all be placed, but the memory may be another request's by now.
                    self._status = Status.NOT_OPEN
                elif self._staged is not None:
                    scatter(self.memory.arrays, *self._staged)
        self._targets, self._staged = [], None
        self._answer(ANSWER.pack(self._header.batch_id, self._status))
        self._expect(HEADER.size, self._on_header)

    def _answer(self, data: bytes) -> None:
        self._answers += data
        self._send_answers()

    def _send_answers(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._answers = self._answers[self.sock.send(self._answers) :]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._answers else 0)
        if events != self._events:
            self._events = events
            self.io.watch(self.sock, events, self._on_ready)
