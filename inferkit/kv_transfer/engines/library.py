"""What the engines share that drive a transfer library with blocking calls (Mooncake, MemFabric).

Such a library writes to raw addresses of a session. It checks that the memory is registered, but
knows no transfer and no epoch, and offers no way to revoke a write: `fence` is unable, so what was
not acknowledged stays in quarantine until the receiver restarts. A restarted receiver has another
port and other addresses.
"""

import queue
import threading
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from inferkit.core.protocols import FenceState, WriteState
from inferkit.kv_transfer.engines.base import BaseEngine, OpenTransfers, Peer, Write
from inferkit.kv_transfer.engines.runs import (
    NUM_BYTES,
    Ints,
    TransferEngineError,
    expand_runs,
    split,
)

PART_BYTES = 8 << 20
MAX_CALL_RUNS = 256
"""One call moves at most so much: Mooncake's TCP refuses what does not fit into its queue of some
thousand pieces of 64 KiB, over all threads. `cancel` acts between parts."""


class Session(Peer):
    """A receiver: its session in the library, and the address of each region."""

    session_id: str
    addresses: Ints


class Task(NamedTuple):
    peer: Session
    write: Write
    runs: Ints


class LibraryEngine(BaseEngine):
    """Threads that make the library's blocking calls, so that nobody else has to."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.session_id = ""
        self._open_transfers = OpenTransfers()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Raises TransferEngineError when the library is missing or cannot start."""
        self._open()
        for index, view in enumerate(self.regions):
            self._register_memory(index, view)
        self._threads = [
            threading.Thread(target=self._run, name=f"{self.name}-{index}", daemon=True)
            for index in range(self.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        super().close()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self.session_id:
            self._shut()
            self.session_id = ""

    def open_transfer(self, transfer_id: int) -> None:
        self._check_alive()
        self._open_transfers.open(transfer_id)

    def close_transfer(self, transfer_id: int) -> None:
        self._open_transfers.close(transfer_id)

    def fence(self, transfer_id: int) -> FenceState:
        return FenceState.UNABLE

    @abstractmethod
    def _open(self) -> None:
        """Start the library and set `session_id`."""

    @abstractmethod
    def _shut(self) -> None: ...

    @abstractmethod
    def _register_memory(self, region: int, view: torch.Tensor) -> None: ...

    @abstractmethod
    def _write(
        self, session_id: str, sources: list[int], targets: list[int], lengths: list[int]
    ) -> int:
        """Write addresses to addresses; returns 0 once all bytes are placed."""

    def _register(self, view: torch.Tensor) -> None:
        if self.session_id:
            self._register_memory(len(self.regions), view)

    def _address(self) -> list[Any]:
        if not self.session_id:
            raise TransferEngineError(f"the {self.name} engine has no session before start()")
        return [self.session_id, [view.data_ptr() for view in self.regions]]

    def _connect(self, description: Mapping[str, Any], sizes: Ints) -> Peer:
        match description.get("address"):
            case [str(session_id), [*addresses]] if len(addresses) == len(sizes) and all(
                isinstance(address, int) and 0 < address < 1 << 63 for address in addresses
            ):
                peer = Session(description, sizes)
                peer.session_id = session_id
                peer.addresses = np.array(addresses, dtype=np.int64)
                return peer
        raise TransferEngineError("a peer's address is not [session, [address, ...]]")

    def _disconnect(self, peer: Peer) -> None:
        """The library keeps its own links; what is queued here fails."""
        peer.close("the peer was disconnected")

    def _post(self, peer: Peer, transfer_id: int, runs: Ints) -> Write:
        assert isinstance(peer, Session)
        parts = split(runs, PART_BYTES)
        write = Write(transfer_id, len(parts))
        for part in parts:
            self._tasks.put(Task(peer, write, part))
        return write

    def _run(self) -> None:
        try:
            while (task := self._tasks.get()) is not None:
                self._do(task)
        except BaseException as error:
            self._fail(error)

    def _do(self, task: Task) -> None:
        peer, write, runs = task.peer, task.write, expand_runs(task.runs)
        if write.is_cancelled or not peer.is_open:
            write.end_part(WriteState.FAILED, "cancelled" if write.is_cancelled else peer.error)
            return
        own = np.array([view.data_ptr() for view in self.regions], dtype=np.int64)
        for start in range(0, len(runs), MAX_CALL_RUNS):
            part = runs[start : start + MAX_CALL_RUNS]
            code = self._write(
                peer.session_id,
                (own[part[:, 0]] + part[:, 1]).tolist(),
                (peer.addresses[part[:, 2]] + part[:, 3]).tolist(),
                part[:, NUM_BYTES].tolist(),
            )
            if code:
                # The library does not say whether it refused, or broke off on the way.
                write.end_part(
                    WriteState.LOST,
                    f"{self.name} could not write to {peer.session_id}: code {code}; is the "
                    "receiver alive and its memory registered?",
                )
                return
        write.end_part(WriteState.DONE)
