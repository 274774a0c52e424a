"""A transfer engine of the weakest kind that the contract allows, and the memory it writes.

Cells land one by one and at any time, also after their author has aborted or died and after
decode has closed the transfer; only a fence or the death of the target stops them. A handle ends
as done only when all its cells are placed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from inferkit.core.protocols import WriteState
from tests.kv_transfer.loop import Loop


@dataclass(frozen=True)
class Faults:
    """Probabilities and delays of writes."""

    delay_s: float = 0.05
    late: float = 0.0
    """Share of writes that take up to `late_s`."""
    late_s: float = 40.0
    fails: float = 0.0
    is_lost: float = 0.0
    is_early: bool = False
    """Breaks the contract: handles are done at once, though cells of a link land in order."""
    is_done_when_sent: bool = False
    """Breaks the contract: handles are done at once, and cells land in any order."""
    ignores_epoch: bool = False
    """Breaks the contract: the target's memory takes writes for its former life."""
    has_peer_fence: bool = False
    """A fence cuts the whole peer off: its other transfers break with it."""
    fence_s: float = 0.2


@dataclass(eq=False)
class Cell:
    """One block of KV, or a piece of a slot, on its way."""

    write: "Write"
    manager_key: str = ""
    source: int = 0
    block: int = 0
    slot: int = 0
    offset: int = 0
    data: bytes = b""

    @property
    def is_slot(self) -> bool:
        return bool(self.data)

    def place(self) -> tuple[str, int, int]:
        return self.manager_key, self.block, self.offset


@dataclass(eq=False)
class Write:
    writer: Any
    """The prefill node, in one life."""
    write_id: int
    key: Any
    ghost: Any
    """Whose KV it is; the protocol knows nothing of it."""
    target: tuple[str, int]
    """Decode instance and rank: an address, not a life."""
    target_epoch: int
    transfer_id: int
    cells: dict[Cell, None] = field(default_factory=dict)
    """On their way, in order: a schedule is the same in every process."""
    state: WriteState = WriteState.RUNNING
    is_revoked: bool = False
    is_doomed: bool = False
    """A part of it will not land, so it cannot end as done."""


class SimEngine:
    """All links of a world."""

    def __init__(self, *, loop: Loop, rng: Random, faults: Faults) -> None:
        self.loop = loop
        self.rng = rng
        self.faults = faults
        self.cells: dict[Cell, None] = {}
        self.running: dict[Write, None] = {}
        self.targets: dict[tuple[str, int], Any] = {}
        """(instance, rank) -> decode node that lives there now."""
        self._order: dict[tuple[int, tuple[str, int]], float] = {}

    def post(self, write: Write, *, is_refused: bool = False) -> None:
        faults, rng = self.faults, self.rng
        if is_refused:
            write.is_doomed = True
            self._end_later(write, WriteState.FAILED, 0.0, drops=True)
        self.cells |= write.cells
        self.running[write] = None
        self._end_if_placed(write)
        draw = rng.random()
        if draw < faults.fails:
            dropped = [cell for cell in write.cells if rng.random() < 0.7]
            for cell in dropped:
                self._take(cell)
            write.is_doomed = True
            self._end_later(write, WriteState.FAILED, faults.delay_s, drops=True)
        elif draw < faults.fails + faults.is_lost:
            self._end_later(write, WriteState.LOST, faults.delay_s, drops=rng.random() < 0.3)
        is_late = rng.random() < faults.late
        longest = faults.late_s if is_late else faults.delay_s
        for cell in sorted(
            write.cells, key=lambda cell: (cell.manager_key, cell.block, cell.offset)
        ):
            at_s = rng.random() * longest
            if faults.is_early:
                link = (id(write.writer), write.target)
                at_s = max(at_s, self._order.get(link, 0.0) - self.loop.now_s)
                self._order[link] = self.loop.now_s + at_s + 1e-9
            self.loop.after(at_s, lambda cell=cell: self._land(cell))
        if faults.is_early or faults.is_done_when_sent:
            self._end_later(write, WriteState.DONE, 0.0, drops=False)

    def cancel(self, write: Write) -> None:
        """What has not begun may be dropped; the rest goes on."""
        if write.state is WriteState.RUNNING and self.rng.random() < 0.5:
            self._end_later(write, WriteState.FAILED, self.faults.delay_s, drops=True)

    def fence(
        self, node: Any, transfer_id: int, broken: Iterable[int], done: Callable[[], None]
    ) -> None:
        """Revoke the transfer at this node after a while; `broken` ones end with it."""
        others = set(broken) if self.faults.has_peer_fence else set()

        def fenced() -> None:
            if not node.is_up:
                return
            for cell in list(self.cells):
                write = cell.write
                if self.targets.get(write.target) is not node:
                    continue
                if write.transfer_id == transfer_id:
                    write.is_revoked = True
                    self._drop(cell, WriteState.FAILED)
                elif write.transfer_id in others and self.rng.random() < 0.5:
                    # Lost although its handle will be done.
                    self._drop(cell, WriteState.DONE)
            node.fenced.add(transfer_id)
            for other in sorted(others):
                node.on_broken(other)
            done()

        self.loop.after(self.rng.random() * self.faults.fence_s, fenced)

    def writer_dies(self, node: Any) -> None:
        """What its network card has accepted may still land; the rest does not."""
        for cell in list(self.cells):
            if cell.write.writer is node and self.rng.random() < 0.3:
                self._drop(cell, WriteState.FAILED)

    def target_dies(self, target: tuple[str, int]) -> None:
        self.targets.pop(target, None)

    def may_land(self, cell: Cell) -> Any:
        """The node whose memory the cell would reach now, or None if it would be refused."""
        write = cell.write
        node = self.targets.get(write.target)
        if node is None or write.is_revoked or write.transfer_id in node.fenced:
            return None
        if node.me.epoch != write.target_epoch and not self.faults.ignores_epoch:
            return None
        return node

    def _land(self, cell: Cell) -> None:
        if cell not in self.cells:
            return
        node = self.may_land(cell)
        if node is None:
            self._drop(cell, WriteState.FAILED)
            return
        node.place(cell)
        self._take(cell)
        self._end_if_placed(cell.write)

    def _drop(self, cell: Cell, state: WriteState) -> None:
        self._take(cell)
        if state is WriteState.FAILED:
            cell.write.is_doomed = True
            self._end_later(cell.write, WriteState.FAILED, self.faults.delay_s, drops=True)
        else:
            self._end_if_placed(cell.write)

    def _take(self, cell: Cell) -> None:
        self.cells.pop(cell, None)
        cell.write.cells.pop(cell, None)

    def _end_if_placed(self, write: Write) -> None:
        if not write.cells and not write.is_doomed:
            self._end_later(write, WriteState.DONE, 0.01, drops=False)

    def _end_later(self, write: Write, state: WriteState, delay_s: float, *, drops: bool) -> None:
        def end() -> None:
            if write.state is not WriteState.RUNNING:
                return
            write.state = state
            self.running.pop(write, None)
            if drops:
                for cell in list(write.cells):
                    self._take(cell)
            write.writer.on_write_ended(write.write_id, state)

        self.loop.after(self.rng.random() * delay_s, end)
