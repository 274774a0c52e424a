"""The writer's side of the shared-memory engine: a link to one receiver, and threads that copy.

Every copy is announced before it is allowed:

    cells[thread] = transfer_id         in memory that the receiver reads
    if table[...] != transfer_id: stop  in memory that the receiver writes
    copy
    cells[thread] = 0

The receiver clears the table and then looks at the cells. With a barrier of all processes in
between (membarrier), either the writer sees that the transfer is closed, or the receiver sees the
writer's cell. A writer that dies leaves its cell behind, and the end of its socket proves it dead.
"""

import ctypes
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from inferkit.core.protocols import WriteState
from inferkit.kv_transfer.engines.base import Peer, Write
from inferkit.kv_transfer.engines.copies import (
    Bytes,
    addresses,
    are_small,
    gather,
    pieces_of,
    scatter,
)
from inferkit.kv_transfer.engines.io_thread import IoThread
from inferkit.kv_transfer.engines.memfd import Words, map_bytes, map_words, touch
from inferkit.kv_transfer.engines.runs import (
    LOCAL,
    NUM_BYTES,
    NUM_PIECES,
    REMOTE,
    Ints,
    TransferEngineError,
    expand_runs,
    split,
)
from inferkit.kv_transfer.engines.shared_memory_hello import HELLO, MAX_FDS, WELCOME, Hello, Welcome

logger = logging.getLogger(__name__)

MIN_PART_BYTES, MAX_PART_BYTES = 4 << 20, 32 << 20
"""A batch is shared out between the threads; a fence waits for one part at most."""
STAGE_BYTES = 1 << 20
"""Small runs pass through a buffer of this size, which stays in a cache of the core."""
CONNECT_TIMEOUT_S = 10.0

NO_WORDS: Words = np.zeros(0, np.uint64)

NOT_OPEN = "the transfer is not open at the receiver: it is over, or was fenced"


class Task(NamedTuple):
    peer: "SharedMemoryPeer"
    write: Write
    runs: Ints


class SharedMemoryPeer(Peer):
    """The link to a receiver: its memory, mapped into this process.

    It lasts until the receiver closes its socket or the peer is disconnected. Then nothing is
    copied any more, the memory is unmapped, and only then this end of the socket is closed: the
    receiver takes that for the proof that this process cannot write.
    """

    def __init__(self, description: Mapping[str, Any], sizes: Ints, io: IoThread) -> None:
        super().__init__(description, sizes)
        name, places = _check_address(description, len(sizes))
        self.io = io
        self.table = NO_WORDS
        self.cells = NO_WORDS
        self.regions: list[Bytes] = []
        self._name = name
        self._places = places
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_linked = False
        self._waiting: list[tuple[queue.SimpleQueue[Task | None], Task]] = []
        self._deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        self._sock: socket.socket | None = None

    def start(self, hello: Hello) -> None:
        """On its IoThread: ask the receiver for its memory."""
        if not self.is_open:
            return
        sock = self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.io.on_tick.add(self._on_tick)
        try:
            sock.setblocking(False)
            sock.connect(self._name)
            sock.send(HELLO.pack(*hello))
        except OSError as error:
            self.close(
                f"no receiver at {self._name[1:].decode('ascii', 'replace')}: {error}; shared "
                "memory needs both processes on one host, under one user"
            )
            return
        self.io.watch(sock, selectors.EVENT_READ, self._on_ready)

    def post(self, tasks: "queue.SimpleQueue[Task | None]", task: Task) -> None:
        """Hand a task to the copying threads once the memory is there; from any thread."""
        with self._lock:
            if self.is_open:
                if self._is_linked:
                    tasks.put(task)
                else:
                    self._waiting.append((tasks, task))
                return
        task.write.end_part(WriteState.FAILED, self.error)

    def enter(self) -> bool:
        """Whether a thread may copy now; if so, `leave` follows."""
        with self._lock:
            if self.is_open:
                self._num_users += 1
            return self.is_open

    def leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_last = self._num_users == 0 and not self.is_open
        if is_last:
            self._unmap()

    def close(self, why: str) -> None:
        """From any thread. Copies that go on are finished."""
        with self._lock:
            if not self.is_open:
                return
            super().close(why)
            waiting, self._waiting = self._waiting, []
            is_last = self._num_users == 0
        logger.debug("shared memory link closed: %s", why)
        for _, task in waiting:
            task.write.end_part(WriteState.FAILED, why)
        if is_last:
            self._unmap()

    def _unmap(self) -> None:
        # The mappings go with the last reference to their arrays.
        self.regions, self.table, self.cells = [], NO_WORDS, NO_WORDS
        self.io.call(self._end)

    def _end(self) -> None:
        if self._sock is not None:
            self.io.on_tick.discard(self._on_tick)
            self.io.unwatch(self._sock)
            self._sock.close()
            self._sock = None

    def _on_tick(self) -> None:
        if not self._is_linked and time.monotonic() > self._deadline_s:
            self.close("the receiver does not answer")

    def _on_ready(self, events: int) -> None:
        assert self._sock is not None
        try:
            data, fds, _, _ = socket.recv_fds(
                self._sock, WELCOME.size, MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))
            return
        try:
            self._on_message(data, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _on_message(self, data: bytes, fds: Sequence[int]) -> None:
        if len(data) != WELCOME.size:
            self.close("the receiver has ended the link")
            return
        welcome = Welcome(*WELCOME.unpack(data))
        if welcome.error:
            self.close(welcome.reason)
            return
        try:
            memories = [map_bytes(fd) for fd in fds[2:]]
            table, cells = map_words(fds[0], writable=False), map_words(fds[1], writable=True)
            regions = _regions(memories, self._places, self.sizes)
        except (IndexError, OSError, ValueError, TransferEngineError) as error:
            self.close(f"the receiver's memory cannot be mapped: {error}")
            return
        owned = [os.dup(fd) for fd in fds[2:]]
        threading.Thread(target=_touch_all, args=(memories, owned), daemon=True).start()
        with self._lock:
            if not self.is_open:
                return
            self.table, self.cells, self.regions = table, cells, regions
            self._is_linked = True
            waiting, self._waiting = self._waiting, []
            for tasks, task in waiting:
                tasks.put(task)


def _touch_all(memories: Sequence[Bytes], fds: Sequence[int]) -> None:
    """Beside the first writes: pages of a large cache take a second per gigabyte."""
    for memory, fd in zip(memories, fds, strict=True):
        touch(memory, fd)
        os.close(fd)


class Copier:
    """One thread that copies. `index` is its cell in the memory of every receiver."""

    def __init__(self, index: int, tasks: "queue.SimpleQueue[Task | None]", engine: Any) -> None:
        self.index = index
        self.tasks = tasks
        self.engine = engine
        self._thread = threading.Thread(target=self._run, name=f"shm-transfer-{index}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """After a None for each thread was queued."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while (task := self.tasks.get()) is not None:
                self._do(task)
        except BaseException as error:
            self.engine._fail(error)

    def _do(self, task: Task) -> None:
        peer, write = task.peer, task.write
        if write.is_cancelled:
            write.end_part(WriteState.FAILED, "cancelled")
            return
        if not peer.enter():
            write.end_part(WriteState.FAILED, peer.error)
            return
        try:
            peer.cells[self.index] = write.transfer_id
            is_allowed = peer.table[write.transfer_id % len(peer.table)] == write.transfer_id
            if is_allowed:
                _copy(self.engine.arrays, peer.regions, task.runs)
        finally:
            peer.cells[self.index] = 0
            peer.leave()
        if is_allowed:
            write.end_part(WriteState.DONE)
        else:
            write.end_part(WriteState.FAILED, NOT_OPEN)


def _copy(sources: Sequence[Bytes], targets: Sequence[Bytes], runs: Ints) -> None:
    if are_small(runs[:, LOCAL]):
        is_strided = runs[:, NUM_PIECES] > 1
        for row in runs[is_strided]:
            source = pieces_of(sources[row[0]], row[list(LOCAL)])
            pieces_of(targets[row[2]], row[list(REMOTE)])[:] = source
        if not is_strided.all():
            for part in split(runs[~is_strided], STAGE_BYTES):
                scatter(targets, part[:, REMOTE], gather(sources, part[:, LOCAL]))
        return
    runs = expand_runs(runs)
    from_addresses = (addresses(sources)[runs[:, 0]] + runs[:, 1]).tolist()
    to_addresses = (addresses(targets)[runs[:, 2]] + runs[:, 3]).tolist()
    lengths = runs[:, NUM_BYTES].tolist()
    # memmove lets go of the interpreter's lock; a copy between slices does not.
    for target, source, length in zip(to_addresses, from_addresses, lengths, strict=True):
        ctypes.memmove(target, source, length)


def _check_address(description: Mapping[str, Any], num_regions: int) -> tuple[bytes, list[Any]]:
    """The name of the receiver's socket, and (memory, offset) of each region."""
    match description.get("address"):
        case [str(name), [*places]] if name.isascii() and len(places) == num_regions:
            for place in places:
                match place:
                    case [int(memory), int(offset)] if memory >= -1 and offset >= 0:
                        continue
                break
            else:
                return b"\0" + name.encode("ascii"), places
    raise TransferEngineError("a peer's address is not [socket name, [[memory, offset], ...]]")


def _regions(memories: Sequence[Bytes], places: Sequence[Any], sizes: Ints) -> list[Bytes]:
    regions = []
    for (memory, offset), size in zip(places, sizes.tolist(), strict=True):
        data = memories[memory][offset : offset + size] if size else np.zeros(0, np.uint8)
        if len(data) != size:
            raise TransferEngineError(f"memory {memory} has no {size} bytes at {offset}")
        regions.append(data)
    return regions
