"""Engines of one process that write into each other's memory: for tests and a virtual clock.

Nothing happens by itself. Engines that share a `Fabric` can reach each other, and the test holds
posts back, lands them late, in another order or half, and lets a writer die with posts in flight.
"""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from inferkit.core.protocols import FenceState, WriteState
from inferkit.kv_transfer.engines.base import BaseEngine, OpenTransfers, Peer, Write
from inferkit.kv_transfer.engines.copies import Bytes, gather, scatter
from inferkit.kv_transfer.engines.runs import (
    LOCAL,
    NUM_BYTES,
    NUM_PIECES,
    REMOTE,
    Ints,
    TransferEngineError,
    first_outside,
)


class Post:
    """A batch in flight. It reads its source when it lands, unless its writer is gone by then."""

    def __init__(self, writer: "InProcessEngine", peer: Peer, write: Write, runs: Ints) -> None:
        self.writer = writer
        self.peer = peer
        self.write = write
        self.runs = runs
        self.num_landed = 0
        self._kept: Bytes | None = None
        self._ends = np.cumsum(runs[:, NUM_BYTES] * runs[:, NUM_PIECES])

    def take(self, first: int, last: int) -> Bytes:
        """The bytes of the runs [first, last)."""
        if self._kept is None:
            return gather(self.writer.arrays, self.runs[first:last, LOCAL])
        start = int(self._ends[first - 1]) if first else 0
        return self._kept[start : int(self._ends[last - 1])]

    def keep_sources(self) -> None:
        """From now on the source may change: its bytes are under way."""
        if self._kept is None:
            self._kept = self.take(0, len(self.runs))

    def end(self, state: WriteState, error: str = "") -> None:
        if self.write.state is WriteState.RUNNING:
            self.write.end_part(state, error)


class Fabric:
    """The wire between engines.

    `is_held` keeps new posts in `posts` (oldest first) until `land`; otherwise they land at once.
    """

    def __init__(self) -> None:
        self.is_held = False
        self.posts: list[Post] = []
        self.engines: dict[str, InProcessEngine] = {}
        """Address -> the engine that listens there now."""
        self.lock = threading.RLock()

    def land(self, post: Post, num_runs: int | None = None) -> None:
        """Place the next runs of a post (None = all that are left), or have it refused."""
        with self.lock:
            assert post in self.posts, "the post has landed, or was dropped"
            refusal = self._refusal(post)
            if refusal:
                self.posts.remove(post)
                post.end(WriteState.FAILED, refusal)
                return
            target = self.engines[post.peer.description["address"]]
            end = len(post.runs) if num_runs is None else post.num_landed + num_runs
            end = min(end, len(post.runs))
            places = post.runs[post.num_landed : end, REMOTE]
            scatter(target.arrays, places, post.take(post.num_landed, end))
            post.num_landed = end
            if post.num_landed == len(post.runs):
                self.posts.remove(post)
                post.end(WriteState.DONE)

    def land_all(self) -> None:
        for post in list(self.posts):
            self.land(post)

    def lose(self, post: Post, why: str = "the link broke") -> None:
        """The writer gives the post up; it is still in flight and may land."""
        with self.lock:
            post.keep_sources()
            post.end(WriteState.LOST, why)

    def drop(self, post: Post) -> None:
        """The post is gone and will not land; its writer learns that nothing is in flight."""
        with self.lock:
            self.posts.remove(post)
            post.end(WriteState.FAILED, "dropped")

    def remove(self, engine: "InProcessEngine") -> None:
        """A process ended, closed or killed: what it posted is still in flight."""
        with self.lock:
            if self.engines.get(engine.address) is engine:
                del self.engines[engine.address]
            for post in self.posts:
                if post.writer is engine:
                    self.lose(post, "the engine was closed")

    def _refusal(self, post: Post) -> str:
        description = post.peer.description
        target = self.engines.get(description["address"])
        if target is None or target.epoch != description["epoch"]:
            return f"nobody of epoch {description['epoch']} is at {description['address']}"
        if post.write.transfer_id not in target.open_transfers:
            return f"transfer {post.write.transfer_id} is not open at the receiver"
        row = first_outside(post.runs[:, REMOTE], target.sizes)
        return "" if row is None else f"the receiver has no such memory (run {row})"


class InProcessEngine(BaseEngine):
    """Args:
    fabric: what it shares with its peers.
    address: where it listens; empty = one of its own. An engine that starts at the address of
        another takes its place, as a restarted process does.
    """

    name = "in_process"

    def __init__(self, *, fabric: Fabric, address: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fabric = fabric
        self.address = address or f"{self.epoch:016x}.{self.rank}"
        self.arrays: list[Bytes] = []
        self.open_transfers = OpenTransfers()
        self.fence_answer = FenceState.DONE
        """What `fence` says, for tests of slow fences and of engines that have none."""

    def start(self) -> None:
        with self.fabric.lock:
            self.fabric.engines[self.address] = self

    def close(self) -> None:
        super().close()
        self.fabric.remove(self)

    def open_transfer(self, transfer_id: int) -> None:
        self.open_transfers.open(transfer_id)

    def close_transfer(self, transfer_id: int) -> None:
        with self.fabric.lock:
            self.open_transfers.close(transfer_id)

    def fence(self, transfer_id: int) -> FenceState:
        if self.fence_answer is not FenceState.UNABLE:
            self.close_transfer(transfer_id)
        return self.fence_answer

    def _register(self, view: torch.Tensor) -> None:
        super()._register(view)
        self.arrays.append(view.numpy())

    def _address(self) -> str:
        return self.address

    def _connect(self, description: Mapping[str, Any], sizes: Ints) -> Peer:
        if not isinstance(description.get("address"), str):
            raise TransferEngineError(f"a peer's description has no address: {description}")
        return Peer(description, sizes)

    def _disconnect(self, peer: Peer) -> None:
        peer.close("the peer was disconnected")
        with self.fabric.lock:
            for post in self.fabric.posts:
                if post.peer is peer:
                    self.fabric.lose(post, "the peer was disconnected")

    def _post(self, peer: Peer, transfer_id: int, runs: Ints) -> Write:
        write = Write(transfer_id)
        with self.fabric.lock:
            post = Post(self, peer, write, runs)
            self.fabric.posts.append(post)
            if not self.fabric.is_held:
                self.fabric.land(post)
        return write
