"""Plain sockets: no package, no driver. Any host can be reached.

The receiving process copies the bytes itself, straight from the socket into registered memory, and
answers each frame when its bytes are placed. So a fence is the removal of the transfer from its
table, and it acts per transfer. A connection is bound to the epoch of the receiver, and every
frame names it again: what was meant for a former process at this address is refused.

What crosses the network is neither encrypted nor authenticated; whoever reads an epoch off the
wire can write into registered memory. Use it in a network of your own.
"""

import itertools
import socket
import threading
from collections.abc import Mapping
from typing import Any

import torch

from inferkit.core.protocols import FenceState
from inferkit.kv_transfer.engines.base import BaseEngine, OpenTransfers, Peer, Write
from inferkit.kv_transfer.engines.copies import Bytes
from inferkit.kv_transfer.engines.io_thread import IoThread, accept
from inferkit.kv_transfer.engines.runs import Ints, TransferEngineError, split
from inferkit.kv_transfer.engines.tcp_frames import (
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_FRAME_RUNS,
    Hello,
)
from inferkit.kv_transfer.engines.tcp_receiver import Incoming
from inferkit.kv_transfer.engines.tcp_sender import Outgoing, make_part

PART_BYTES = MAX_FRAME_BYTES
"""A batch is spread over the connections in parts of this size."""


class TcpPeer(Peer):
    connections: list[Outgoing]


class TcpEngine(BaseEngine):
    """Args:
    port: where peers connect to (0 = a free one).
    num_connections: to each peer. More than one pays off when a single stream does not fill
        the network.
    connect_timeout_s: for a connection to be made and the receiver to agree.
    """

    name = "tcp"

    def __init__(
        self,
        *,
        port: int = 0,
        num_connections: int = 2,
        connect_timeout_s: float = 3.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if num_connections < 1:
            raise TransferEngineError(f"num_connections={num_connections}; at least one is needed")
        self.port = port
        self.num_connections = num_connections
        self.connect_timeout_s = connect_timeout_s
        self.open_transfers = OpenTransfers()
        self.arrays: list[Bytes] = []
        self._io: list[IoThread] = []
        self._next_io = itertools.count()
        self._batch_ids = itertools.count(1)
        self._listener: socket.socket | None = None
        self._incoming: set[Incoming] = set()
        self._outgoing: set[Outgoing] = set()
        self._links_lock = threading.Lock()

    def start(self) -> None:
        """Raises OSError when the port cannot be had."""
        if self.receives:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            self._listener = socket.create_server((self.host, self.port), family=family)
            self._listener.setblocking(False)
            self.port = self._listener.getsockname()[1]
        self._io = [
            IoThread(f"tcp-transfer-{index}", self._fail) for index in range(self.num_threads)
        ]
        for io in self._io:
            io.start()
        if self._listener is not None:
            first, listener = self._io[0], self._listener
            first.call(lambda: first.watch(listener, 1, self._on_connection))

    def close(self) -> None:
        super().close()
        for io in self._io:
            io.close()
        self._io = []
        # No thread is left: nothing is being copied any more, and nobody is let in.
        links: list[Incoming | Outgoing] = [*self._incoming, *self._outgoing]
        for link in links:
            link.close("the engine was closed")
        if self._listener is not None:
            self._listener.close()

    def open_transfer(self, transfer_id: int) -> None:
        self._check_alive()
        self.open_transfers.open(transfer_id)

    def close_transfer(self, transfer_id: int) -> None:
        self.open_transfers.close(transfer_id)

    def fence(self, transfer_id: int) -> FenceState:
        self.open_transfers.close(transfer_id)
        with self._links_lock:
            incoming = list(self._incoming)
        # A copy takes what the socket holds and never waits for the writer.
        for connection in incoming:
            connection.pass_copy()
        return FenceState.DONE

    def _register(self, view: torch.Tensor) -> None:
        super()._register(view)
        self.arrays.append(view.numpy())

    def _address(self) -> list[Any]:
        if self._listener is None:
            raise TransferEngineError("the tcp engine has no port before start()")
        return [self.host, self.port]

    def _on_connection(self, events: int) -> None:
        assert self._listener is not None
        sock = accept(self._listener)
        if sock is None:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = Incoming(sock, self._pick_io(), self, lambda: self._forget(connection))
        with self._links_lock:
            self._incoming.add(connection)
        connection.io.call(connection.start)

    def _forget(self, link: Incoming | Outgoing) -> None:
        with self._links_lock:
            self._incoming.discard(link)
            self._outgoing.discard(link)

    def _pick_io(self) -> IoThread:
        return self._io[next(self._next_io) % len(self._io)]

    def _connect(self, description: Mapping[str, Any], sizes: Ints) -> Peer:
        match description.get("address"):
            case [str(host), int(port)] if 0 < port < 1 << 16:
                pass
            case address:
                raise TransferEngineError(f"a peer's address {address!r} is not [host, port]")
        peer = TcpPeer(description, sizes)
        hello = Hello(MAGIC, description["epoch"], self.epoch, self.rank)
        peer.connections = [
            self._make_connection(peer, (host, port), hello) for _ in range(self.num_connections)
        ]
        with self._links_lock:
            self._outgoing.update(peer.connections)
        for connection in peer.connections:
            connection.io.call(connection.start)
        return peer

    def _make_connection(self, peer: TcpPeer, address: tuple[str, int], hello: Hello) -> Outgoing:
        def on_close(why: str) -> None:
            peer.close(why)
            self._forget(connection)
            for other in peer.connections:
                other.io.call(other.finish)

        connection = Outgoing(
            address,
            self._pick_io(),
            hello=hello,
            regions=self.arrays,
            connect_timeout_s=self.connect_timeout_s,
            timeout_s=self.write_timeout_s,
            on_close=on_close,
        )
        return connection

    def _disconnect(self, peer: Peer) -> None:
        assert isinstance(peer, TcpPeer)
        peer.close("the peer was disconnected")
        for connection in peer.connections:
            connection.io.call(lambda c=connection: c.close("the peer was disconnected"))  # type: ignore[misc]

    def _post(self, peer: Peer, transfer_id: int, runs: Ints) -> Write:
        assert isinstance(peer, TcpPeer)
        frames = [
            part[start : start + MAX_FRAME_RUNS]
            for part in split(runs, PART_BYTES)
            for start in range(0, len(part), MAX_FRAME_RUNS)
        ]
        write = Write(transfer_id, len(frames))
        epoch = peer.description["epoch"]
        for frame in frames:
            part = make_part(write, frame, epoch=epoch, batch_id=next(self._batch_ids))
            least = min(peer.connections, key=lambda connection: connection.load)
            least.post(part)
        return write
