"""What a rank's loop is told: the same messages, in the same order, on all ranks of a DP rank."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from inferkit.core.messages import Abort, Generate, MessageReader, ToWorker, encode
from inferkit.core.protocols import Clock
from inferkit.online.instance import Instance
from inferkit.online.worker_link import WorkerLink
from inferkit.parallel.communicator import Communicator

OnRefused = Callable[[tuple[int, int], str], None]


class RequestFeed:
    """The leader receives, checks, and broadcasts bytes; the others decode what it sends.

    The clock is the leader's: it also ends requests whose time is over, by an abort that all
    ranks get like any other.

    Args:
        link: of the leader; None on the other ranks.
        group: the ranks of this DP rank; None where there is only one.
        on_refused: called on the leader with the key of a request that is malformed, and why.
    """

    def __init__(
        self,
        *,
        instance: Instance,
        link: WorkerLink | None,
        group: Communicator | None,
        clock: Clock,
        on_refused: OnRefused,
    ) -> None:
        self.instance = instance
        self.link = link
        self.group = group
        self.clock = clock
        self.on_refused = on_refused
        self.reader: MessageReader[ToWorker] = MessageReader(
            ToWorker, epoch=instance.epoch, peer_epoch=instance.epoch
        )
        self._deadlines: dict[tuple[int, int], float] = {}

    @property
    def num_dropped(self) -> int:
        return self.reader.num_dropped.total()

    def receive(self, wait_ms: int) -> list[ToWorker]:
        """Messages since the last call; waits at most `wait_ms` for one, the leader for its
        socket and the others for the leader."""
        if self.group is None:
            frames = self._from_parent(wait_ms)
        else:
            frames = self._broadcast(self._from_parent(wait_ms) if self.link else [], self.group)
        return [message for frame in frames if (message := self.reader.read(frame)) is not None]

    def forget(self, key: tuple[int, int]) -> None:
        """A request is over; its deadline means nothing any more."""
        self._deadlines.pop(key, None)

    def _from_parent(self, wait_ms: int) -> list[bytes]:
        assert self.link is not None, "only a leader has a parent to talk to"
        frames = []
        arrived = self.link.receive(wait_ms)
        now_s = self.clock()
        for frame in arrived:
            message = self.reader.read(frame)
            if message is None:
                refused = self.reader.refused_request(frame)
                if refused is not None:
                    self.on_refused(*refused)
                continue
            if isinstance(message, Generate) and message.remaining_ms:
                self._deadlines[message.key] = now_s + message.remaining_ms / 1000
            frames.append(frame)
        return frames + self._expired(now_s)

    def _expired(self, now_s: float) -> list[bytes]:
        over = [key for key, deadline_s in self._deadlines.items() if deadline_s <= now_s]
        for key in over:
            del self._deadlines[key]
        return [
            encode(
                Abort(
                    **self.instance.header,
                    room=room,
                    attempt=attempt,
                    reason="its time is over",
                )
            )
            for room, attempt in over
        ]

    def _broadcast(self, frames: list[bytes], group: Communicator) -> list[bytes]:
        """The leader's frames, on all ranks of the group."""
        # Every rank must enter, also without a message: a missing rank dead-locks the others.
        data = msgspec.msgpack.encode(frames) if frames else b""
        size = int(group.broadcast(torch.tensor([len(data)])))
        if not size:
            return []
        payload = torch.empty(size, dtype=torch.uint8)
        if group.rank == 0:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        group.broadcast(payload)
        received: Any = msgspec.msgpack.decode(payload.numpy().tobytes(), type=list[bytes])
        return list(received)
