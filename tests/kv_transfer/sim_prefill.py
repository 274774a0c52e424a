"""A simulated prefill rank."""

from typing import TYPE_CHECKING, Any

from inferkit.core.protocols import WriteState
from inferkit.kv_transfer.actions import (
    Action,
    CancelWrites,
    FirstToken,
    PostBlocks,
    PostSlot,
    Ready,
)
from inferkit.kv_transfer.identity import TransferKey
from tests.kv_transfer.sim_engine import Cell, Write
from tests.kv_transfer.sim_nodes import Node
from tests.kv_transfer.sim_requests import BLOCK_SIZE, KEY, Generate

if TYPE_CHECKING:
    from tests.kv_transfer.sim_instance import Instance
    from tests.kv_transfer.world import World


class PrefillNode(Node):
    def __init__(self, world: "World", instance: "Instance", rank: int) -> None:
        super().__init__(world, instance, rank)
        self.ready: list[TransferKey] = []
        self.computing: dict[TransferKey, list[int]] = {}
        self.writes: dict[int, Write] = {}
        self.records = world.prefill_class(
            me=self.me, rank=rank, clock=world.loop.clock, timers=world.timers
        )

    def on_generate(self, event: Generate) -> None:
        if event.ghost.is_refused:
            actions = self.records.refuse(event.key, event.pair.decode, "too long")
        else:
            actions = self.records.accept(event.key, event.pair, remaining_ms=event.remaining_ms)
        self.carry_out(actions)

    def on_action(self, action: Action) -> None:
        if isinstance(action, Ready):
            self.common_log.append((action.key, "ready"))
            self.ready.append(action.key)
        elif isinstance(action, PostBlocks):
            self._post(action, self._block_cells(action))
        elif isinstance(action, PostSlot):
            cell = {"slot": action.handshake.slot, "offset": action.offset, "data": action.data}
            self._post(action, [cell])
        elif isinstance(action, CancelWrites):
            for write_id in action.write_ids:
                if write_id in self.writes:
                    self.world.engine.cancel(self.writes[write_id])

    def _block_cells(self, action: PostBlocks) -> list[dict[str, Any]]:
        first = action.first_token // BLOCK_SIZE
        end = action.end_token // BLOCK_SIZE
        if action.is_last:
            end = -(-action.end_token // BLOCK_SIZE)
        if not self.world.moves_kv(self.rank, action.handshake.decode_rank):
            return []
        blocks = action.handshake.block_ids[KEY][first:end]
        return [{"block": block} for block in blocks]

    def _post(self, action: PostBlocks | PostSlot, cells: list[dict[str, Any]]) -> None:
        handshake = action.handshake
        write = Write(
            writer=self,
            write_id=action.write_id,
            key=action.key,
            ghost=self.ghosts[action.key],
            target=(handshake.instance_id, handshake.decode_rank),
            target_epoch=handshake.memory.engine["epoch"],
            transfer_id=handshake.transfer_id,
            source_blocks=self.pool.held.get(action.key, ()),
        )
        write.cells = {Cell(write, **cell): None for cell in cells}
        self.writes[action.write_id] = write
        self.world.engine.post(write)

    def on_write_ended(self, write_id: int, state: WriteState) -> None:
        if self.is_up:
            del self.writes[write_id]
            self.carry_out(self.records.on_write_ended(write_id, state, "simulated"))

    def schedule(self, draw: float) -> None:
        records = self.records.records
        self.ready = [key for key in self.ready if key in records]
        for key in list(self.ready):
            ghost = self.ghosts[key]
            if len(self.pool.free) >= ghost.num_blocks:
                self.ready.remove(key)
                self.pool.take(key, ghost.num_blocks)
                self.records.begin(key)
                size = -(-ghost.kv_len // ghost.num_chunks)
                ends = [*range(size, ghost.kv_len, size), ghost.kv_len]
                self.computing[key] = ends
        for key, ends in list(self.computing.items()):
            if not self.records.is_sending(key):
                del self.computing[key]
                continue
            end, ghost = ends.pop(0), self.ghosts[key]
            if ends:
                self.carry_out(self.records.send_chunk(key, end))
                continue
            del self.computing[key]
            first_token = FirstToken(ghost.first_token, ghost.kv_len, seed=ghost.request)
            is_end = ghost.finishes
            hand_over = self.records.finish if is_end else self.records.complete
            self.carry_out(hand_over(key, first_token))
