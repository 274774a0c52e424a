"""The thread of a prefill rank that posts writes, polls them and tells how each has ended.

Knows neither records nor messages. What it is given is done in order. A write that it was given is
in flight for everybody else until it has told its end, whether it was posted yet or not.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inferkit.core.errors import InferkitError
from inferkit.core.protocols import TransferEngine, WriteState
from inferkit.kv_transfer.actions import BlockIds, PostBlocks, PostSlot
from inferkit.kv_transfer.decode_targets import DecodeTarget, DecodeTargets
from inferkit.kv_transfer.metadata_slot import SLOT_BYTES
from inferkit.kv_transfer.rank_memory import RankMemory

logger = logging.getLogger(__name__)

MIN_POLL_S, MAX_POLL_S = 0.0002, 0.001
"""Between two looks at writes that are in flight: at first often, then less."""
CLEAN_UP_S = 5.0
"""Former and idle decode ranks are looked for so often."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a request holds on the prefill side, as it was when a write was ordered."""

    block_ids: BlockIds
    kv_len: int = 0
    """Known with the first token."""


@dataclass(frozen=True, slots=True)
class Order:
    """A write to be posted."""

    post: PostBlocks | PostSlot
    source: Source


@dataclass(slots=True)
class _Flight:
    order: Order
    target: DecodeTarget
    handle: Any
    cell: int | None


OnEnded = Callable[[Order, WriteState, str], None]
"""(order, done, failed or lost, why); called on the thread."""


class WriteThread:
    """Args:
    on_ended: told once of every order.
    on_failure: told once, on the thread, when it has ended by an error.
    """

    def __init__(
        self,
        *,
        engine: TransferEngine,
        memory: RankMemory,
        targets: DecodeTargets,
        on_ended: OnEnded,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.engine = engine
        self.memory = memory
        self.targets = targets
        self.on_ended = on_ended
        self.on_failure = on_failure
        self._tasks: queue.SimpleQueue[Order | tuple[int, ...] | None] = queue.SimpleQueue()
        """Orders, write ids to cancel, and None at the end."""
        self._cancelled: set[int] = set()
        """Of orders that were not looked at when they were cancelled."""
        self._flights: dict[int, _Flight] = {}
        self._free_cells = deque(range(memory.num_cells))
        self._without_cell: deque[Order] = deque()
        """Slot writes that wait for a cell to be written from."""
        self._thread = threading.Thread(target=self._run, name="kv-transfer-writes", daemon=True)
        self._is_closing = False

    @property
    def num_queued(self) -> int:
        return self._tasks.qsize() + len(self._without_cell)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; writes that are in flight are left to the engine's own `close`."""
        self._is_closing = True
        self._tasks.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def order(self, order: Order) -> None:
        self._tasks.put(order)

    def cancel(self, write_ids: Sequence[int]) -> None:
        """Drop what has not begun; each of them still ends, and is told."""
        self._cancelled.update(write_ids)
        self._tasks.put(tuple(write_ids))

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        poll_s, next_clean_up = MIN_POLL_S, 0.0
        try:
            while not self._is_closing:
                self._take_tasks(poll_s if self._flights else CLEAN_UP_S)
                has_ended = self._poll()
                poll_s = MIN_POLL_S if has_ended else min(1.5 * poll_s, MAX_POLL_S)
                now = self.targets.clock()
                if now >= next_clean_up:
                    next_clean_up = now + CLEAN_UP_S
                    self.targets.forget_old()
        except BaseException as error:
            self.on_failure(error)

    def _take_tasks(self, wait_s: float) -> None:
        """Everything that is there; waits for the first."""
        try:
            task = self._tasks.get(timeout=wait_s)
            while not self._is_closing:
                if isinstance(task, Order):
                    self._begin(task)
                elif task is not None:
                    self._cancel(task)
                task = self._tasks.get_nowait()
        except queue.Empty:
            return

    def _begin(self, order: Order) -> None:
        if order.post.write_id in self._cancelled:
            self._cancelled.discard(order.post.write_id)
            self.on_ended(order, WriteState.FAILED, "cancelled before it was posted")
        elif isinstance(order.post, PostSlot) and not self._free_cells:
            self._without_cell.append(order)
        else:
            self._post(order)

    def _post(self, order: Order) -> None:
        """A write that cannot be posted has failed: nothing of it was begun."""
        cell = self._free_cells.popleft() if isinstance(order.post, PostSlot) else None
        try:
            target = self.targets.of(order.post.handshake)
            runs = self._runs(order, target, cell)
            handle = (
                self.engine.write_batch(target.link, order.post.handshake.transfer_id, runs)
                if len(runs)
                else None
            )
        except (InferkitError, OverflowError) as error:  # numbers of a peer may be huge
            logger.warning("room=%d a write cannot be posted: %s", order.post.key.room, error)
            self._give_back(cell)
            self.on_ended(order, WriteState.FAILED, str(error))
            return
        if handle is None:
            self.on_ended(order, WriteState.DONE, "")
            return
        target.num_in_flight += 1
        self._flights[order.post.write_id] = _Flight(order, target, handle, cell)

    def _runs(self, order: Order, target: DecodeTarget, cell: int | None) -> Any:
        """[n, 8] or [1, 5] integers; none where the link has nothing to move yet."""
        post = order.post
        if isinstance(post, PostBlocks):
            return target.plan.descriptors(
                order.source.block_ids,
                post.handshake.block_ids,
                first_token=post.first_token,
                end_token=post.end_token,
                is_last=post.is_last,
            )
        assert cell is not None, "a slot is written from a cell"
        start = cell * SLOT_BYTES
        data = torch.frombuffer(bytearray(post.data), dtype=torch.uint8)
        self.memory.cells[start : start + len(data)] = data
        memory = post.handshake.memory
        offset = memory.slot_offset + post.handshake.slot * SLOT_BYTES + post.offset
        run = (self.memory.cells_region, start, memory.slot_region, offset, len(data))
        return np.array([run], np.int64)

    def _cancel(self, write_ids: Sequence[int]) -> None:
        for write_id in write_ids:
            flight = self._flights.get(write_id)
            if flight is not None:
                self.engine.cancel(flight.handle)
            for order in [o for o in self._without_cell if o.post.write_id == write_id]:
                self._without_cell.remove(order)
                self.on_ended(order, WriteState.FAILED, "cancelled before it was posted")
        # Their orders came before: all have been looked at.
        self._cancelled.difference_update(write_ids)

    def _poll(self) -> bool:
        """Tell what has ended; returns whether anything has."""
        ended = []
        for write_id, flight in self._flights.items():
            state = self.engine.poll(flight.handle)
            if state is not WriteState.RUNNING:
                ended.append((write_id, flight, state))
        for write_id, flight, state in ended:
            del self._flights[write_id]
            flight.target.num_in_flight -= 1
            self._give_back(flight.cell)
            self.on_ended(flight.order, state, flight.handle.error)
        while self._free_cells and self._without_cell:
            self._post(self._without_cell.popleft())
        return bool(ended)

    def _give_back(self, cell: int | None) -> None:
        if cell is not None:
            self._free_cells.append(cell)
