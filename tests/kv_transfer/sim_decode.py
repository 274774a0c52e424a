"""A simulated decode rank and its memory."""

from typing import TYPE_CHECKING

from inferkit.core.transfer_messages import TargetMemory
from inferkit.kv_transfer.actions import (
    Action,
    Code,
    Fence,
    Finished,
    Landed,
    Release,
    Retracted,
)
from inferkit.kv_transfer.decode_record import DecodePhase
from inferkit.kv_transfer.directory import PrefillDirectory
from inferkit.kv_transfer.identity import Peer, TransferKey
from inferkit.kv_transfer.metadata_slot import SLOT_BYTES, MetadataSlots
from inferkit.kv_transfer.rank_mapping import PrefillServerInfo
from tests.kv_transfer.sim_engine import Cell
from tests.kv_transfer.sim_nodes import Node
from tests.kv_transfer.sim_requests import KEY, Generate, Ghost, Violation

if TYPE_CHECKING:
    from tests.kv_transfer.sim_instance import Instance
    from tests.kv_transfer.world import World


class DecodeNode(Node):
    def __init__(self, world: "World", instance: "Instance", rank: int) -> None:
        super().__init__(world, instance, rank)
        self.cells: dict[tuple[int, int], Ghost] = {}
        """(block, prefill rank) -> whose KV it holds."""
        self.slot_memory = bytearray(SLOT_BYTES * instance.num_slots)
        self.fenced: set[int] = set()
        self.directory = PrefillDirectory(
            layout=world.layout(world.plan.decode_tp), tp_rank=rank, decode_id=instance.name
        )
        self.running: dict[TransferKey, int] = {}
        """Request -> steps that are left."""
        self.landed: set[TransferKey] = set()
        self.retracted: dict[TransferKey, int] = {}
        """The same of requests without device blocks."""
        self.copied: set[TransferKey] = set()
        """Retracted requests whose copy is complete on every rank."""
        self.host: dict[TransferKey, dict[tuple[int, int], Ghost]] = {}
        """Host areas that are held, with what was copied there: (order of block, rank)."""
        world.engine.targets[instance.name, rank] = self
        self.records = world.decode_class(
            me=self.me,
            rank=rank,
            reply_address="",
            memory=TargetMemory(engine={"epoch": self.me.epoch}),
            slots=world.slots_class(
                memory=memoryview(self.slot_memory), num_slots=instance.num_slots
            ),
            routes=self.directory.routes,
            clock=world.loop.clock,
            timers=world.timers,
        )

    @property
    def slots(self) -> MetadataSlots:
        slots: MetadataSlots = self.records.slots
        return slots

    def learn(self, name: str, epoch: int) -> None:
        layout = self.world.layout(self.world.plan.prefill_tp)
        addresses = {rank: f"tcp://{name}/{rank}" for rank in range(layout.attn_tp_size)}
        info = PrefillServerInfo(peer=Peer(name, epoch), layout=layout, addresses=addresses)
        replaced, _ = self.directory.learn(info)
        if replaced is not None:
            self.carry_out(self.records.on_peer_gone(replaced))

    def lose(self, peer: Peer) -> None:
        self.directory.lose(peer)
        self.carry_out(self.records.on_peer_gone(peer))

    def find(self, peer: Peer) -> None:
        self.directory.find(peer)
        self.records.on_peer_back(peer)

    def on_broken(self, transfer_id: int) -> None:
        self.records.on_broken(transfer_id)

    def place(self, cell: Cell) -> None:
        """Bytes arrive in this rank's memory."""
        if cell.is_slot:
            start = cell.slot * SLOT_BYTES + cell.offset
            self.slot_memory[start : start + len(cell.data)] = cell.data
        else:
            self.cells[cell.block, cell.write.writer.rank] = cell.write.ghost

    def on_generate(self, event: Generate) -> None:
        if event.ghost.never_fits:
            self.common_log.append((event.key, Code.REFUSED))
            if self.rank == 0:
                self.instance.answer(event.key, Code.REFUSED)
            return
        self.carry_out(
            self.records.accept(
                event.key,
                event.pair,
                kv_len=event.ghost.kv_len,
                seed=event.ghost.request,
                remaining_ms=event.remaining_ms,
            )
        )

    def on_action(self, action: Action) -> None:
        if isinstance(action, Landed):
            self._check_landed(action)
            self.common_log.append((action.key, "landed"))
            self.landed.add(action.key)
            self.running[action.key] = self.ghosts[action.key].num_steps
            if self.rank == 0:
                self.instance.stream(action.key)
        elif isinstance(action, Finished):
            self.common_log.append((action.key, "finished"))
            if action.status.first_token != self.ghosts[action.key].first_token:
                raise Violation(f"{action.key} ends with a token of another request")
        elif isinstance(action, Retracted):
            self.common_log.append((action.key, "retracted"))
            self.copied.add(action.key)
        elif isinstance(action, Fence):
            self._fence(action)

    def _fence(self, action: Fence) -> None:
        records = self.records.records.values()
        siblings = [
            record.transfer_id
            for record in records
            if record.transfer_id != action.transfer_id
            and record.prefill == action.peer
            and record.phase in (DecodePhase.ADMITTED, DecodePhase.DRAINING)
        ]
        self.world.engine.fence(
            self,
            action.transfer_id,
            siblings,
            lambda: self.records.on_fenced(action.transfer_id),
        )

    def _check_landed(self, action: Landed) -> None:
        ghost = self.ghosts[action.key]
        self.check_content(action.key, "runs")
        tokens = (action.slot.first_token, action.status.first_token)
        if tokens != (ghost.first_token, ghost.first_token):
            raise Violation(f"{action.key} runs with a first token that is not its own")

    def check_content(self, key: TransferKey, what: str) -> None:
        for block in self.pool.held[key]:
            for rank in self.world.senders(self.rank):
                if self.cells.get((block, rank)) != self.ghosts[key]:
                    raise Violation(
                        f"{key} {what} on KV of {self.cells.get((block, rank))} in block {block} "
                        f"from prefill rank {rank}"
                    )

    def on_release(self, action: Release) -> None:
        if action.blocks:
            self.running.pop(action.key, None)
        if action.host_area:
            if action.key not in self.host:
                raise Violation(f"{action.key} gives back a host area that it does not hold")
            del self.host[action.key]
            self.retracted.pop(action.key, None)
            self.copied.discard(action.key)

    def schedule(self, draw: float) -> None:
        self._retract(draw)
        for key in list(self.retracted):
            ghost = self.ghosts[key]
            if key in self.copied and len(self.pool.free) >= ghost.num_blocks:
                self._resume(key, ghost)
        for key in list(self.running):
            self.running[key] -= 1
            if self.running[key] < 0:
                self.carry_out(self.records.complete(key))
        for key in self.records.admissible():
            num_blocks = self.ghosts[key].num_blocks
            if len(self.pool.free) >= num_blocks and self.slots.num_free:
                blocks = self.pool.take(key, num_blocks)
                self.common_log.append((key, "admitted", blocks))
                self.carry_out(self.records.admit(key, {KEY: blocks}))

    def _retract(self, draw: float) -> None:
        may_retract = len(self.running) > 1 and len(self.host) < self.instance.num_host_areas
        if not may_retract or draw >= self.world.plan.retracts:
            return
        key = list(self.running)[-1]
        self.retracted[key] = self.running.pop(key)
        self.host[key] = {}
        self.common_log.append((key, "retract"))
        self.records.retract(key)
        blocks = self.pool.held[key]

        def copied() -> None:
            if self.is_up and key in self.host:
                self.host[key] = {
                    (order, rank): self.cells[block, rank]
                    for order, block in enumerate(blocks)
                    for rank in self.world.senders(self.rank)
                    if (block, rank) in self.cells
                }
                self.records.on_copied(key)

        self.world.loop.after(self.world.rng.random(), copied)

    def _resume(self, key: TransferKey, ghost: Ghost) -> None:
        for order, block in enumerate(self.pool.take(key, ghost.num_blocks)):
            for rank in self.world.senders(self.rank):
                self.cells[block, rank] = self.host[key].get((order, rank), ghost)
                if (order, rank) not in self.host[key]:
                    del self.cells[block, rank]
        self.check_content(key, "resumes")
        self.running[key] = self.retracted[key]
        self.carry_out(self.records.resume(key))
