"""The sockets of control messages of one rank: what arrives, and a way to everyone who asked.

One thread owns the sockets: it alone calls `receive`. Every thread may `post`. Nothing waits for a
peer and nothing is repeated: a frame that finds no room is dropped and counted, which the protocol
heals. Bytes are not looked into; with a secret each frame carries an HMAC-SHA256 in front.
"""

import contextlib
import ipaddress
import logging
import math
import os
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

import zmq

from inferkit.core.errors import ConfigError
from inferkit.kv_transfer.signature import FrameSeal

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 << 20
"""A Handshake of a million tokens has some 100 KB."""
MAX_QUEUED = 4096
"""Frames that wait for this rank, and for each peer."""
MAX_FRAMES_AT_ONCE = 256
"""So that timers run although frames keep coming."""
MAX_PEERS = 1024
IDLE_S = 120.0
"""A peer that was sent nothing for so long loses its socket; renewals come every few seconds."""
LINGER_MS = 200
RECONNECT_MS, MAX_RECONNECT_MS = 50, 2000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5000, 15000
"""A host that vanished is noticed, and connected to again."""

_ADDRESS = re.compile(r"tcp://(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


@dataclass(slots=True)
class _Peer:
    socket: "zmq.Socket[bytes]"
    used_at: float


class ControlChannel:
    """The constructor stores; `start` opens sockets, `close` undoes it.

    Args:
        host: address of this rank under which peers reach it.
        secret: of all instances together; empty = frames are not authenticated.

    Raises:
        ConfigError: no secret, and the host is not this machine's own loopback.
    """

    def __init__(self, *, host: str, secret: bytes = b"") -> None:
        if not secret and not is_loopback(host):
            raise ConfigError(
                f"control messages at {host} come from other hosts and must be authenticated; "
                "set disagg.secret_env to a variable that holds the same secret on all hosts"
            )
        self.host = host
        self.seal = FrameSeal(secret)
        self.port = 0
        self.num_dropped: Counter[str] = Counter()
        """Frames that went nowhere, by cause."""
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._lock = threading.Lock()
        """Guards the outbox, and the wake-up descriptor against being closed meanwhile."""
        self._wake_fd: int | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._inbox: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()

    @property
    def address(self) -> str:
        """Where peers send to; known after `start`."""
        return f"tcp://{_bracketed(self.host)}:{self.port}"

    def start(self) -> None:
        """Raises zmq.ZMQError when the host is none of this machine's addresses."""
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.IPV6, ":" in self.host)
        self._inbox.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._inbox.setsockopt(zmq.LINGER, 0)
        self._inbox.bind(f"tcp://{_bracketed(self.host)}:*")
        self.port = int(self._inbox.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def close(self) -> None:
        """The thread that called `receive` has ended. What was posted gets a moment to leave."""
        with self._lock:
            wake_fd, self._wake_fd = self._wake_fd, None
        if self._context is None:
            return
        if wake_fd is not None:
            self._send_posted()
            os.close(wake_fd)
        for peer in self._peers.values():
            peer.socket.close()
        self._peers.clear()
        if self._inbox is not None:
            self._inbox.close()
        self._context.term()
        self._context = self._inbox = None

    def post(self, address: str, frame: bytes) -> None:
        """Queue a frame; never waits. Dropped when too many wait, or after `close`."""
        with self._lock:
            if self._wake_fd is None:
                self.drop("closed")
            elif len(self._outbox) >= MAX_QUEUED:
                self.drop("outbox_full")
            else:
                self._outbox.append((address, frame))
                os.eventfd_write(self._wake_fd, 1)

    def wake(self) -> None:
        """Let `receive` return now."""
        with self._lock:
            if self._wake_fd is not None:
                os.eventfd_write(self._wake_fd, 1)

    def receive(self, wait_s: float) -> list[bytes]:
        """Send what was posted; the authentic frames that are there, or come within `wait_s`."""
        assert self._inbox is not None and self._wake_fd is not None, "start() comes first"
        self._send_posted()
        self._poller.poll(max(0, math.ceil(wait_s * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        frames: list[bytes] = []
        for _ in range(MAX_FRAMES_AT_ONCE):
            try:
                parts = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            frame = self._opened(parts)
            if frame is not None:
                frames.append(frame)
        self._send_posted()
        self._close_idle()
        return frames

    def drop(self, cause: str) -> None:
        self.num_dropped[cause] += 1
        if self.num_dropped[cause] == 1:
            logger.warning("a control frame is dropped (%s); others only count", cause)

    # -- the owner's part ----------------------------------------------------------------------

    def _send_posted(self) -> None:
        while self._outbox:
            address, frame = self._outbox.popleft()
            socket = self._socket_to(address)
            if socket is None:
                continue
            try:
                socket.send(self.seal.seal(frame), zmq.NOBLOCK)
            except zmq.Again:
                self.drop("peer_queue_full")

    def _socket_to(self, address: str) -> "zmq.Socket[bytes] | None":
        now = time.monotonic()
        peer = self._peers.get(address)
        if peer is None:
            socket = self._connected(address)
            if socket is None:
                return None
            while len(self._peers) >= MAX_PEERS:
                self._close_oldest()
            peer = self._peers[address] = _Peer(socket, now)
        peer.used_at = now
        self._peers.move_to_end(address)
        return peer.socket

    def _connected(self, address: str) -> "zmq.Socket[bytes] | None":
        """Addresses come from peers: only plain TCP ones are followed."""
        parts = _ADDRESS.fullmatch(address)
        if parts is None or not 0 < int(parts[1]) < 1 << 16:
            self.drop("bad_address")
            return None
        assert self._context is not None, "start() comes first"
        socket = self._context.socket(zmq.PUSH)
        for option, value in (
            (zmq.IPV6, "[" in address),
            (zmq.SNDHWM, MAX_QUEUED),
            (zmq.LINGER, LINGER_MS),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        ):
            socket.setsockopt(option, value)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            self.drop("bad_address")
            return None
        return socket

    def _close_idle(self) -> None:
        now = time.monotonic()
        while self._peers and now >= next(iter(self._peers.values())).used_at + IDLE_S:
            self._close_oldest()

    def _close_oldest(self) -> None:
        """Peers are in order of their last use."""
        _, peer = self._peers.popitem(last=False)
        peer.socket.close()

    def _opened(self, parts: list[bytes]) -> bytes | None:
        if len(parts) != 1:
            self.drop("malformed")
            return None
        frame = self.seal.open(parts[0])
        if frame is None:
            self.drop("not_authentic")
        return frame


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
