"""Memory that both processes map: the writer copies straight into the receiver's KV cache.

For processes of one user on one host. The receiver allocates the memory (`allocate`), hands it to
each writer over a local socket, and copies nothing. It cannot take a mapping back from a living
writer, so a fence proves that no copy is going on (see `shared_memory_writer`):

    the writer's cell names another transfer, or none      nothing of this one is under way
    the writer's socket has ended                          it is dead, or has unmapped the memory
    neither, for PATIENCE_S                                it is paused in the midst of a copy

In the last case the receiver leaves the memory to it: it moves its own to a new file, under the
same addresses. That ends every link and breaks all transfers that were open; each of them needs an
acknowledgement or a fence of its own, which then is done at once.
"""

import contextlib
import logging
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from inferkit.core.protocols import FenceState
from inferkit.kv_transfer.engines.base import BaseEngine, Peer, Write, check_transfer_id
from inferkit.kv_transfer.engines.copies import Bytes
from inferkit.kv_transfer.engines.io_thread import IoThread, accept
from inferkit.kv_transfer.engines.memfd import (
    SharedBuffer,
    SharedWords,
    membarrier,
    register_for_membarrier,
)
from inferkit.kv_transfer.engines.runs import (
    Ints,
    TransferEngineError,
    num_bytes,
    split,
)
from inferkit.kv_transfer.engines.shared_memory_hello import (
    BAD_HELLO,
    HELLO,
    MAGIC,
    MAX_FDS,
    OTHER_EPOCH,
    WELCOME,
    Hello,
)
from inferkit.kv_transfer.engines.shared_memory_writer import (
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    Copier,
    SharedMemoryPeer,
    Task,
)

logger = logging.getLogger(__name__)

TABLE_WORDS = 1 << 16
"""Transfers that can be open at once: their ids modulo this number differ."""
NUM_CELLS = 512
PATIENCE_S = 2.0


class Link:
    """A writer as the receiver sees it. Its methods belong to the IoThread."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.cells: SharedWords | None = None
        """None until the memory was handed over."""

    def is_copying(self, transfer_id: int) -> bool:
        return self.cells is not None and bool((self.cells.words == transfer_id).any())

    def close(self) -> None:
        self.sock.close()
        if self.cells is not None:
            self.cells.close()


class SharedMemoryEngine(BaseEngine):
    """Zero copies at the receiver. Takes no parameters of its own."""

    name = "shared_memory"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.num_threads > NUM_CELLS:
            raise TransferEngineError(f"num_threads={self.num_threads}; at most {NUM_CELLS}")
        self.arrays: list[Bytes] = []
        self._buffers: list[SharedBuffer] = []
        self._places: list[tuple[int, int]] = []
        """(buffer, offset) of each region; buffer -1 = memory that cannot be shared."""
        self._io = IoThread("shm-transfer-io", self._fail)
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._copiers: list[Copier] = []
        self._name = f"inferkit-transfer-{secrets.token_hex(16)}"
        self._listener: socket.socket | None = None
        self._table: SharedWords | None = None
        self._accepted: set[Link] = set()
        """Everyone who has connected; belongs to the IoThread."""
        self._links: set[Link] = set()
        self._links_lock = threading.Lock()
        """Guards links, table and buffers while memory moves to another file."""
        self._busy_since_s: dict[int, float] = {}
        self._broken: list[int] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        with self._links_lock:
            if len(self._buffers) == MAX_FDS - 2:
                raise TransferEngineError(
                    f"{len(self._buffers)} shared buffers are allocated already; allocate fewer, "
                    "larger ones"
                )
            self._buffers.append(SharedBuffer(num_bytes))
            return self._buffers[-1].data

    def start(self) -> None:
        """Raises TransferEngineError where the system cannot do it."""
        register_for_membarrier()
        self._io.start()
        if self.receives:
            self._table = SharedWords(TABLE_WORDS)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.setblocking(False)
            # A name that no other process has or had: a former receiver cannot be meant.
            listener.bind(f"\0{self._name}")
            listener.listen(128)
            self._listener = listener
            self._io.call(
                lambda: self._io.watch(listener, selectors.EVENT_READ, self._on_connection)
            )
        self._copiers = [Copier(index, self._tasks, self) for index in range(self.num_threads)]
        for copier in self._copiers:
            copier.start()

    def close(self) -> None:
        super().close()
        for peer in list(self._peers.values()):
            self._disconnect(peer)
        for _ in self._copiers:
            self._tasks.put(None)
        for copier in self._copiers:
            copier.join()
        self._copiers = []
        self._close_receiver()
        self._io.close()
        for buffer in self._buffers:
            buffer.close()

    def open_transfer(self, transfer_id: int) -> None:
        self._check_alive()
        check_transfer_id(transfer_id)
        words = self._words()
        other = int(words[transfer_id % TABLE_WORDS])
        if other not in (0, transfer_id):
            raise TransferEngineError(
                f"transfer {transfer_id} cannot be opened beside transfer {other}: at most "
                f"{TABLE_WORDS} neighbouring ids are open at once"
            )
        words[transfer_id % TABLE_WORDS] = transfer_id

    def close_transfer(self, transfer_id: int) -> None:
        words = self._words()
        if words[transfer_id % TABLE_WORDS] == transfer_id:
            words[transfer_id % TABLE_WORDS] = 0

    def fence(self, transfer_id: int) -> FenceState:
        self.close_transfer(transfer_id)
        if not self._is_copied(transfer_id):
            self._busy_since_s.pop(transfer_id, None)
            return FenceState.DONE
        now_s = time.monotonic()
        if now_s - self._busy_since_s.setdefault(transfer_id, now_s) < PATIENCE_S:
            return FenceState.RUNNING
        self._leave_memory()
        return FenceState.DONE

    def take_broken(self) -> list[int]:
        broken, self._broken = self._broken, []
        return broken

    def _words(self) -> Any:
        if self._table is None:
            raise TransferEngineError("this engine does not receive: it has no transfers to open")
        return self._table.words

    def _is_copied(self, transfer_id: int) -> bool:
        # What a writer announced before it looked at the table is visible after this barrier.
        membarrier()
        with self._links_lock:
            if any(link.is_copying(transfer_id) for link in self._links):
                return True
        # A cell that was seen cleared: the copy before it is visible after this one.
        membarrier()
        return False

    def _leave_memory(self) -> None:
        """Move this process's memory away from every writer."""
        with self._links_lock:
            logger.warning(
                "a writer has been paused in a copy for %.0f s: shared memory moves to a new file, "
                "%d links end",
                PATIENCE_S,
                len(self._links),
            )
            for link in list(self._links):
                self._end_link(link)
            assert self._table is not None
            words = self._table.words
            self._broken += words[words != 0].tolist()
            words[:] = 0
            self._table.close()
            self._table = SharedWords(TABLE_WORDS)
            for buffer in self._buffers:
                buffer.replace_file()
            self._busy_since_s.clear()

    def _end_link(self, link: Link) -> None:
        self._links.discard(link)
        self._io.call(lambda: self._forget(link))

    def _forget(self, link: Link) -> None:
        self._accepted.discard(link)
        if link.sock.fileno() >= 0:
            self._io.unwatch(link.sock)
            link.close()

    def _close_receiver(self) -> None:
        """No copy goes on afterwards: links end, or the memory is left to them."""
        if self._listener is None or self._table is None:
            return
        for transfer_id in self._table.words[self._table.words != 0].tolist():
            while self.fence(transfer_id) is FenceState.RUNNING:
                time.sleep(0.001)
        with self._links_lock:
            for link in list(self._links):
                self._end_link(link)
        listener = self._listener
        self._io.call(lambda: self._io.unwatch(listener))
        self._io.call(listener.close)
        self._io.call(self._forget_all)
        self._table.close()

    def _forget_all(self) -> None:
        for link in list(self._accepted):
            self._forget(link)

    def _on_connection(self, events: int) -> None:
        assert self._listener is not None
        sock = accept(self._listener)
        if sock is None:
            return
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            sock.close()
            return
        sock.setblocking(False)
        link = Link(sock)
        self._accepted.add(link)
        self._io.watch(sock, selectors.EVENT_READ, lambda _: self._on_message(link))

    def _on_message(self, link: Link) -> None:
        try:
            data = link.sock.recv(HELLO.size)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            if link.cells is None:
                self._welcome(link, data)
            return
        # The end of the socket: the writer is dead or has unmapped everything.
        with self._links_lock:
            self._links.discard(link)
        self._forget(link)

    def _welcome(self, link: Link, data: bytes) -> None:
        error = BAD_HELLO
        if len(data) == HELLO.size:
            hello = Hello(*HELLO.unpack(data))
            if hello.magic == MAGIC and 0 < hello.num_threads <= NUM_CELLS:
                error = 0 if hello.epoch == self.epoch else OTHER_EPOCH
        with self._links_lock, contextlib.suppress(OSError):  # the end of the socket comes next
            if error or self._table is None:
                link.sock.send(WELCOME.pack(error, 0))
                return
            link.cells = SharedWords(NUM_CELLS)
            # Counted before it can write.
            self._links.add(link)
            table = self._table.open_read_only()
            try:
                fds = [table, link.cells.fd, *(buffer.fd for buffer in self._buffers)]
                socket.send_fds(link.sock, [WELCOME.pack(0, len(self._buffers))], fds)
            finally:
                os.close(table)

    def _register(self, view: torch.Tensor) -> None:
        super()._register(view)
        self.arrays.append(view.numpy())
        start, end = view.data_ptr(), view.data_ptr() + len(view)
        for index, buffer in enumerate(self._buffers):
            if buffer.address <= start and end <= buffer.address + buffer.num_bytes:
                self._places.append((index, start - buffer.address))
                return
        self._places.append((-1, 0))

    def _address(self) -> list[Any]:
        return [self._name, [list(place) for place in self._places]]

    def _writable_sizes(self) -> list[int]:
        """Memory that was not allocated here cannot be shared: peers see it as empty."""
        return [
            int(size) if buffer >= 0 else 0
            for size, (buffer, _) in zip(self.sizes, self._places, strict=True)
        ]

    def _connect(self, description: Mapping[str, Any], sizes: Ints) -> Peer:
        peer = SharedMemoryPeer(description, sizes, self._io)
        hello = Hello(MAGIC, description["epoch"], self.epoch, self.rank, self.num_threads)
        self._io.call(lambda: peer.start(hello))
        return peer

    def _disconnect(self, peer: Peer) -> None:
        assert isinstance(peer, SharedMemoryPeer)
        peer.close("the link was closed")

    def _post(self, peer: Peer, transfer_id: int, runs: Ints) -> Write:
        assert isinstance(peer, SharedMemoryPeer)
        share = -(-num_bytes(runs) // self.num_threads)
        parts = split(runs, min(max(share, MIN_PART_BYTES), MAX_PART_BYTES))
        write = Write(transfer_id, len(parts))
        for part in parts:
            peer.post(self._tasks, Task(peer, write, part))
        return write
