"""Tells a rank when another rank ends before the run does, where no parent supervises them all.

A rank that waits for a dead one in shared memory would wait for ever, and one that has nothing to
exchange with it would not notice. Every rank holds a connection to rank 0 for the whole run; one
that closes without a word is a rank that has died.

    rank k -> rank 0    hello (its number), then FINISHED or nothing
    rank 0 -> rank k    FINISHED, or the number of a rank that has died
"""

import contextlib
import os
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from inferkit.core.errors import WorkerError
from inferkit.runtime.rank_errors import PeerLostError

NUMBER = struct.Struct("!i")
FINISHED = -1
POLL_INTERVAL_S = 0.2
CONNECT_TIMEOUT_S = 60
CHECK_INTERVAL_S = 1.0
INTERRUPT = signal.SIGURG
"""Wakes the main thread; by default the system ignores it."""
STUCK_GRACE_S = 3.0
"""So long may the main thread hear no signal; then the process ends without it."""
NAME_GRACE_S = 1.0
KEEPALIVE = {socket.TCP_KEEPIDLE: 3, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 3}
"""A node that vanishes without a word is noticed after 6 s."""

OnStuck = Callable[[PeerLostError], None]


class PeerWatch:
    """The connections of one rank. A loss raises PeerLostError in the main thread, wherever it is.

    Args:
        world_size: rank 0 waits for so many ranks, itself included.
        on_stuck: called on a thread, before the process ends, where the main thread is in code
            that does not return.
    """

    def __init__(self, *, rank: int, world_size: int, on_stuck: OnStuck) -> None:
        self.rank = rank
        self.world_size = world_size
        self.on_stuck = on_stuck
        self.lost_rank: int | None = None
        self._peers: dict[socket.socket, int] = {}
        """Connection -> rank at its other end."""
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peer watch", daemon=True)
        self._handler: Any = None

    def accept(
        self,
        server: socket.socket,
        *,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """On rank 0: take the connection of every other rank.

        Args:
            check: called every second or so; what it raises ends the waiting.

        Raises:
            WorkerError: for so long no further rank has come.
        """
        server.settimeout(min(timeout_s, CHECK_INTERVAL_S))
        last_s = time.monotonic()
        while len(self._peers) < self.world_size - 1:
            try:
                peer, _ = server.accept()
            except TimeoutError as error:
                check()
                if time.monotonic() - last_s < timeout_s:
                    continue
                raise WorkerError(
                    f"{len(self._peers) + 1} of {self.world_size} ranks are there, and for "
                    f"{timeout_s:.0f} s no other has come; have they failed?"
                ) from error
            last_s = time.monotonic()
            peer.settimeout(CONNECT_TIMEOUT_S)
            rank = _receive(peer)
            if rank is None or not 0 < rank < self.world_size:
                peer.close()  # no rank of ours
                continue
            _keep_alive(peer)
            self._peers[peer] = rank

    def connect(self, host: str, port: int) -> None:
        """On another rank: connect to rank 0, which accepts or will."""
        peer = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
        peer.sendall(NUMBER.pack(self.rank))
        _keep_alive(peer)
        self._peers[peer] = 0

    def start(self) -> None:
        """Begin to watch; call on the main thread."""
        self._handler = signal.signal(INTERRUPT, self._on_interrupt)
        self._thread.start()

    def name_loss(self) -> None:
        """Raise PeerLostError if a loss that showed in another way is seen here in a moment."""
        if self._lost.wait(NAME_GRACE_S):
            raise self._error()

    def close(self, *, has_finished: bool) -> None:
        """Stop watching. The others take it as this rank's death unless it has finished."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
            signal.signal(INTERRUPT, self._handler)
        for peer in self._peers:
            with contextlib.suppress(OSError):
                if has_finished:
                    peer.sendall(NUMBER.pack(FINISHED))
            peer.close()
        self._peers.clear()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer, selectors.EVENT_READ)
            while not self._closed.is_set() and selector.get_map():
                for key, _ in selector.select(POLL_INTERVAL_S):
                    assert isinstance(key.fileobj, socket.socket), "only sockets are registered"
                    number = _receive(key.fileobj)
                    selector.unregister(key.fileobj)
                    if number != FINISHED:
                        self._lose(self._peers[key.fileobj] if number is None else number)
                        return

    def _lose(self, rank: int) -> None:
        self.lost_rank = rank
        self._lost.set()
        if self.rank == 0:
            for peer, other in self._peers.items():
                if other != rank:
                    with contextlib.suppress(OSError):
                        peer.sendall(NUMBER.pack(rank))
        ident = threading.main_thread().ident
        assert ident is not None, "the main thread has been started"
        signal.pthread_kill(ident, INTERRUPT)
        if not self._closed.wait(STUCK_GRACE_S):
            self.on_stuck(self._error())
            os._exit(1)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.lost_rank is not None and not self._closed.is_set():
            raise self._error()

    def _error(self) -> PeerLostError:
        return PeerLostError(
            f"rank {self.lost_rank} has ended, or its node cannot be reached; where it has run, "
            "its output and terminal tell why"
        )


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        peer.setsockopt(socket.IPPROTO_TCP, option, value)


def _receive(peer: socket.socket) -> int | None:
    """The next number; None = the other end is gone."""
    data = b""
    try:
        while len(data) < NUMBER.size:
            more = peer.recv(NUMBER.size - len(data))
            if not more:
                return None
            data += more
    except OSError:
        return None
    number: int = NUMBER.unpack(data)[0]
    return number
