"""What all transfer engines share: regions, handles, checks of descriptions and of bounds."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from inferkit.core.place import LOOPBACK
from inferkit.core.protocols import FenceState, Region, WriteState
from inferkit.kv_transfer.engines.runs import (
    LOCAL,
    REMOTE,
    Ints,
    TransferEngineError,
    as_runs,
    check_bounds,
)

FORMAT = 1
"""Version of descriptions and of what travels on the engines' own sockets."""
MAX_REGIONS = 1 << 16


class Write:
    """The handle of a batch. Its parts end one by one, on any thread; the worst end is its own."""

    SEVERITY = (WriteState.RUNNING, WriteState.DONE, WriteState.FAILED, WriteState.LOST)

    def __init__(self, transfer_id: int, num_parts: int = 1) -> None:
        self.transfer_id = transfer_id
        self.error = ""
        self.is_cancelled = False
        self._worst = WriteState.DONE
        self._num_running = num_parts
        self._lock = threading.Lock()

    @property
    def state(self) -> WriteState:
        return self._worst if self._num_running == 0 else WriteState.RUNNING

    def end_part(self, state: WriteState, error: str = "") -> None:
        assert state is not WriteState.RUNNING
        with self._lock:
            assert self._num_running > 0, "a part of a write ended twice"
            if self.SEVERITY.index(state) > self.SEVERITY.index(self._worst):
                self._worst, self.error = state, error
            self._num_running -= 1


class Peer:
    """A target as its description gives it. Engines add their link to it."""

    def __init__(self, description: Mapping[str, Any], sizes: Ints) -> None:
        self.description = dict(description)
        self.sizes = sizes
        """[regions] bytes; 0 where peers cannot write."""
        self.is_open = True
        """False once nothing more can be posted to it; `error` says why."""
        self.error = ""

    def close(self, why: str) -> None:
        """Take no more posts. The first reason is the one that counts."""
        if self.is_open:
            self.error = why
            self.is_open = False


class BaseEngine(ABC):
    """A transfer engine. The constructor stores; `start` opens sockets and threads.

    Args:
        epoch: of this instance: 64 random bits, new whenever one of its ranks restarts.
        rank: of this process within its instance; (epoch, rank) names an engine.
        host: address under which peers reach this process.
        device_id: index of this rank's device on the node.
        receives: whether peers write to this process; a writer opens no port.
        num_threads: threads that move bytes.
        write_timeout_s: where bytes travel over a connection, one on which nothing moves for so
            long is closed.
    """

    name: ClassVar[str]

    def __init__(
        self,
        *,
        epoch: int,
        rank: int = 0,
        host: str = LOOPBACK,
        device_id: int = 0,
        receives: bool = True,
        num_threads: int = 4,
        write_timeout_s: float = 10.0,
    ) -> None:
        if not 0 <= epoch < 1 << 64 or num_threads < 1:
            raise TransferEngineError(
                f"epoch={epoch} and num_threads={num_threads}: an epoch is an unsigned 64-bit "
                "number, and at least one thread moves bytes"
            )
        self.epoch = epoch
        self.rank = rank
        self.host = host
        self.device_id = device_id
        self.receives = receives
        self.num_threads = num_threads
        self.write_timeout_s = write_timeout_s
        self.regions: list[torch.Tensor] = []
        """[n] uint8 view of each registered buffer; it keeps the memory alive."""
        self.sizes = np.zeros(0, np.int64)
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        """Guards regions, peers and what a subclass says."""
        self._failure: BaseException | None = None
        self._is_closed = False

    def allocate(self, num_bytes: int) -> torch.Tensor:
        # numpy's zeros cost no memory until they are written.
        return torch.from_numpy(np.zeros(num_bytes, np.uint8))

    def register(self, buffer: torch.Tensor) -> Region:
        if not buffer.is_contiguous() or not buffer.nbytes:
            raise TransferEngineError(
                f"a {buffer.dtype} tensor {list(buffer.shape)} with strides {buffer.stride()} "
                "cannot be registered: it must be contiguous and not empty"
            )
        view = buffer.detach().view(-1).view(torch.uint8)
        with self._lock:
            if len(self.regions) == MAX_REGIONS:
                raise TransferEngineError(
                    f"{MAX_REGIONS} regions are registered already; register larger buffers"
                )
            self._register(view)
            self.regions.append(view)
            self.sizes = np.append(self.sizes, np.int64(len(view)))
            return Region(len(self.regions) - 1, len(view))

    def check(self) -> None:
        """Raises TransferEngineError once a thread of the engine has ended by an error."""
        self._check_alive()

    def describe(self) -> dict[str, Any]:
        if not self.receives:
            raise TransferEngineError(
                f"the {self.name} engine of rank {self.rank} was built with receives=False: it "
                "has no address that peers can write to"
            )
        return {
            "engine": self.name,
            "format": FORMAT,
            "epoch": self.epoch,
            "rank": self.rank,
            "address": self._address(),
            "regions": self._writable_sizes(),
        }

    def connect(self, description: Mapping[str, Any]) -> Peer:
        self._check_can_post()
        key, sizes = _check_description(description, self.name)
        with self._lock:
            peer = self._peers.get(key)
            if peer is None or not peer.is_open:
                self._peers = {k: known for k, known in self._peers.items() if known.is_open}
                peer = self._peers[key] = self._connect(description, sizes)
        return peer

    def disconnect(self, peer: Peer) -> None:
        with self._lock:
            keys = [key for key, known in self._peers.items() if known is peer]
            for key in keys:
                del self._peers[key]
        self._disconnect(peer)

    def write_batch(self, peer: Peer, transfer_id: int, runs: npt.ArrayLike) -> Write:
        """Post a batch; see TransferEngine.

        Raises:
            TransferEngineError: a run lies outside what is registered here or described there, or
                the engine itself has failed. Nothing was posted.
        """
        self._check_can_post()
        check_transfer_id(transfer_id)
        rows = as_runs(runs)
        check_bounds(rows[:, LOCAL], self.sizes, "this engine's")
        check_bounds(rows[:, REMOTE], peer.sizes, "the peer's")
        if not peer.is_open:
            write = Write(transfer_id)
            write.end_part(WriteState.FAILED, f"{peer.error}; connect to the peer again")
            return write
        return self._post(peer, transfer_id, rows)

    def poll(self, handle: Write) -> WriteState:
        self._check_alive()
        return handle.state

    def cancel(self, handle: Write) -> None:
        handle.is_cancelled = True

    def take_broken(self) -> list[int]:
        return []

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def open_transfer(self, transfer_id: int) -> None: ...

    @abstractmethod
    def close_transfer(self, transfer_id: int) -> None: ...

    @abstractmethod
    def fence(self, transfer_id: int) -> FenceState: ...

    def close(self) -> None:
        """Subclasses extend it. Writes that are still running end as failed or lost."""
        self._is_closed = True

    @abstractmethod
    def _address(self) -> Any:
        """Where peers connect to: plain values."""

    @abstractmethod
    def _connect(self, description: Mapping[str, Any], sizes: Ints) -> Peer:
        """Begin a link; does not wait. Raises TransferEngineError on a malformed address."""

    @abstractmethod
    def _disconnect(self, peer: Peer) -> None:
        """Close the peer."""

    @abstractmethod
    def _post(self, peer: Peer, transfer_id: int, runs: Ints) -> Write:
        """Queue a batch whose bounds are checked."""

    def _register(self, view: torch.Tensor) -> None:
        """Hook: make [n] uint8 memory known to the transport; raises TransferEngineError."""
        if view.device.type != "cpu":
            raise TransferEngineError(
                f"the {self.name} engine moves host memory, not {view.device}; choose an engine "
                "for this device with disagg.transfer"
            )

    def _writable_sizes(self) -> list[int]:
        return [int(size) for size in self.sizes]

    def _fail(self, error: BaseException) -> None:
        """A thread of the engine ended by `error`: every later call reports it."""
        self._failure = error

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise TransferEngineError(
                f"the {self.name} engine has stopped: {self._failure!r}"
            ) from self._failure

    def _check_can_post(self) -> None:
        self._check_alive()
        if self._is_closed:
            raise TransferEngineError(f"the {self.name} engine was closed")


class OpenTransfers:
    """Ids of the transfers whose writes may land, for engines whose receiver copies."""

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._ids

    def open(self, transfer_id: int) -> None:
        check_transfer_id(transfer_id)
        self._ids.add(transfer_id)

    def close(self, transfer_id: int) -> None:
        self._ids.discard(transfer_id)


def check_transfer_id(transfer_id: int) -> None:
    if not 0 < transfer_id < 1 << 64:
        raise TransferEngineError(f"transfer_id={transfer_id} lies outside 1..2^64-1")


def _check_description(description: Mapping[str, Any], name: str) -> tuple[str, Ints]:
    """A key that is equal for equal descriptions, and the sizes of the peer's regions."""
    engine, version = description.get("engine"), description.get("format")
    if engine != name or version != FORMAT:
        raise TransferEngineError(
            f"the peer offers transfer engine {engine!r} (format {version!r}), this process runs "
            f"{name!r} (format {FORMAT}); set the same disagg.transfer on both sides"
        )
    epoch, regions = description.get("epoch"), description.get("regions")
    if not _is_int(epoch, 0, 1 << 64) or not _is_int(description.get("rank"), 0, 1 << 32):
        raise TransferEngineError(f"a peer's description has a bad epoch or rank: {description}")
    if (
        not isinstance(regions, list | tuple)
        or len(regions) > MAX_REGIONS
        or not all(_is_int(size, 0, 1 << 62) for size in regions)
    ):
        raise TransferEngineError("a peer's description has no list of region sizes in bytes")
    return repr(sorted(description.items())), np.array(regions, dtype=np.int64)


def _is_int(value: object, low: int, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < end
