"""What components are given from outside: time, messages, the engine, transfers."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from inferkit.core.batch import Batch
from inferkit.core.step_output import StepOutput

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


class Clock(Protocol):
    """Monotonic time in seconds; `time.monotonic` is one."""

    def __call__(self) -> float: ...


class Engine(Protocol):
    """What a scheduler may ask of an engine."""

    def forward_batch(self, batch: Batch) -> StepOutput:
        """Run one step; every rank enters with equal arguments, also with a dummy batch."""
        ...


class Channel(Protocol):
    """One-way messages from a worker to whoever shows progress."""

    def send(self, event: dict[str, Any]) -> None: ...


class Region(NamedTuple):
    """Memory that a transfer engine reads from or writes to."""

    region_id: int
    """Counts from 0 within the engine that registered it."""
    num_bytes: int


class Run(NamedTuple):
    """Bytes that are adjacent on both sides."""

    local_region: int
    local_offset: int
    remote_region: int
    remote_offset: int
    num_bytes: int


class StridedRun(NamedTuple):
    """Pieces of `num_bytes` at equal distances: some heads of the tokens of a block."""

    local_region: int
    local_offset: int
    remote_region: int
    remote_offset: int
    num_bytes: int
    num_pieces: int
    local_stride: int
    """From the start of a piece to that of the next."""
    remote_stride: int


class WriteState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    """All bytes are placed at the target, not just handed to a socket."""
    FAILED = "failed"
    """Nothing of it is in flight or will land any more; a part may have landed before."""
    LOST = "lost"
    """The source is not read any more, but bytes may still land. Nobody acknowledges the drain of
    such a write: only the target's fence ends it."""


class FenceState(StrEnum):
    DONE = "done"
    RUNNING = "running"
    """Not proven yet: ask again."""
    UNABLE = "unable"
    """The engine cannot revoke a write: the memory stays in quarantine until this process ends."""


class WriteHandle(Protocol):
    """A batch that was posted."""

    @property
    def transfer_id(self) -> int: ...

    @property
    def error(self) -> str:
        """Why it failed or was lost; empty otherwise."""
        ...


class TransferEngine(Protocol):
    """Writes registered memory of this process into that of a peer.

    One engine serves both sides. The receiver registers its memory, opens a transfer and sends
    `describe()` to the writer, which connects to that description and writes. No call waits for
    a peer, and every method may be called from any thread unless it says otherwise.

    The rules that make memory safe to reuse:

    - A write lands only while its transfer is open at the receiver, in the epoch that the
      description named, and inside registered memory; both sides check.
    - Every handle ends as done, failed or lost; until then the write is in flight, however long
      ago it was posted.
    - After `fence` has answered done, no write of the transfer lands, posted before or after.
    """

    def start(self) -> None:
        """Open sockets and start threads."""
        ...

    def allocate(self, num_bytes: int) -> "torch.Tensor":
        """Zeroed uint8 memory of a kind that peers can write into; `register` is still needed."""
        ...

    def register(self, buffer: "torch.Tensor") -> Region:
        """Let the engine read a contiguous tensor, and let peers write to it where that can be.

        All regions are registered before the first `describe()`. The tensor stays where it is
        until `close`.
        """
        ...

    def check(self) -> None:
        """Raise the error that has ended the engine; nothing while it works."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a peer must know to write to this engine: plain values that travel in a message."""
        ...

    # The writer

    def connect(self, description: Mapping[str, Any]) -> Any:
        """The peer that a description names; writes may be posted at once.

        An equal description gives the same peer, or a new one when the link of the old is gone.
        """
        ...

    def disconnect(self, peer: Any) -> None:
        """Forget a peer; what is still in flight to it ends as failed or lost."""
        ...

    def write_batch(self, peer: Any, transfer_id: int, runs: "npt.ArrayLike") -> WriteHandle:
        """Post a batch: [n, 5] integers, a `Run` per row, or [n, 8], a `StridedRun` per row.

        The source must not change until the handle has ended. Batches may land in any order, and
        so may the rows of one batch.
        """
        ...

    def poll(self, handle: WriteHandle) -> WriteState: ...

    def cancel(self, handle: WriteHandle) -> None:
        """Drop what has not begun. The handle ends by itself: go on polling."""
        ...

    # The receiver

    def open_transfer(self, transfer_id: int) -> None:
        """Let writes of it land from now on; comes before the peer hears of it."""
        ...

    def close_transfer(self, transfer_id: int) -> None:
        """End a transfer of which every writer has said that nothing is in flight."""
        ...

    def fence(self, transfer_id: int) -> FenceState:
        """Refuse its writes from now on; done as soon as none can land any more.

        Called again until it is not running, by the thread that runs the model: memory may have
        to be moved.
        """
        ...

    def take_broken(self) -> list[int]:
        """Open transfers that a fence of another one has ended; each is told once.

        Their bytes may be lost although a writer calls its handle done, and their memory is free
        only after a drain acknowledgement or a fence of their own.
        """
        ...

    def close(self) -> None:
        """Undo `start`; afterwards no peer writes into memory of this process."""
        ...
