"""A DP rank's sockets to the parent of its instance. Only the rank's leader has one."""

import zmq

from inferkit.kv_transfer.signature import FrameSeal
from inferkit.online.instance import ParentAddress, socket_identity

UNLIMITED = 0
"""Queues of ZMQ hold no more than the requests in flight make; a full one would block the loop."""
CLOSE_LINGER_MS = 2000
"""The last outputs may still be on their way."""


class WorkerLink:
    """Frames in and out; their content is `core.messages`. No call waits longer than it is told.

    Args:
        context: of this process; closed by its owner.
        secret: shared with the parent; empty = frames are not authenticated.
    """

    def __init__(
        self,
        *,
        context: "zmq.Context[zmq.Socket[bytes]]",
        parent: ParentAddress,
        dp_rank: int,
        secret: bytes = b"",
    ) -> None:
        self.context = context
        self.parent = parent
        self.dp_rank = dp_rank
        self.seal = FrameSeal(secret)
        self._requests: zmq.Socket[bytes] | None = None
        self._outputs: zmq.Socket[bytes] | None = None

    def connect(self) -> None:
        """Returns at once; messages wait until the parent is there."""
        self._requests = self.context.socket(zmq.DEALER)
        self._requests.setsockopt(zmq.IDENTITY, socket_identity(self.parent.instance, self.dp_rank))
        self._outputs = self.context.socket(zmq.PUSH)
        for socket, url in (
            (self._requests, self.parent.request_url),
            (self._outputs, self.parent.output_url),
        ):
            socket.setsockopt(zmq.SNDHWM, UNLIMITED)
            socket.setsockopt(zmq.RCVHWM, UNLIMITED)
            socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
            socket.connect(url)

    def close(self) -> None:
        for socket in (self._requests, self._outputs):
            if socket is not None:
                socket.close()
        self._requests = self._outputs = None

    def announce(self, frame: bytes) -> None:
        """Tell the parent by which address it reaches this rank."""
        assert self._requests is not None, "connect() comes first"
        self._requests.send(self.seal.seal(frame), zmq.NOBLOCK)

    def receive(self, wait_ms: int) -> list[bytes]:
        """All frames that are there; waits at most `wait_ms` for the first."""
        assert self._requests is not None, "connect() comes first"
        frames = []
        if self._requests.poll(wait_ms):
            while self._requests.poll(0):
                frames += self._requests.recv_multipart(zmq.NOBLOCK)
        opened = map(self.seal.open, frames)
        return [frame for frame in opened if frame is not None]

    def send(self, frames: list[bytes]) -> None:
        """Queue frames for the parent."""
        assert self._outputs is not None, "connect() comes first"
        self._outputs.send_multipart(list(map(self.seal.seal, frames)), zmq.NOBLOCK)
