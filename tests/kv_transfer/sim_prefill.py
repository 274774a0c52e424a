"""A simulated prefill rank."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inferkit.core.protocols import WriteState
from inferkit.kv_transfer.actions import (
    Action,
    BlockIds,
    CancelWrites,
    FirstToken,
    PostBlocks,
    PostSlot,
)
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey
from inferkit.kv_transfer.transfer_plan import block_range
from tests.kv_transfer.sim_bootstrap import register
from tests.kv_transfer.sim_engine import Cell, Write
from tests.kv_transfer.sim_nodes import Node
from tests.kv_transfer.sim_requests import BLOCK_SIZE, Violation

if TYPE_CHECKING:
    from tests.kv_transfer.sim_instance import Instance
    from tests.kv_transfer.world import World


class PrefillNode(Node):
    def __init__(self, world: "World", instance: "Instance", rank: int) -> None:
        super().__init__(world, instance, rank, num_lanes=1)
        self.writes: dict[int, Write] = {}
        self.sources: dict[tuple[TransferKey, int], BlockIds] = {}
        """(request, end of a chunk) -> blocks as the scheduler told them."""
        self.records = world.prefill_class(
            me=self.me, rank=rank, clock=world.loop.clock, timers=world.timers
        )
        self.scheduler = world.prefill_scheduler(
            transfer=PrefillTransfer(self), **self.scheduler_parts()
        )
        register(self)

    def on_action(self, action: Action) -> None:
        if isinstance(action, PostBlocks):
            self._post(action, self._block_cells(action))
        elif isinstance(action, PostSlot):
            cell = {"slot": action.handshake.slot, "offset": action.offset, "data": action.data}
            self._post(action, [cell])
        elif isinstance(action, CancelWrites):
            for write_id in action.write_ids:
                if write_id in self.writes:
                    self.world.engine.cancel(self.writes[write_id])

    def _block_cells(self, action: PostBlocks) -> list[dict[str, Any]] | None:
        """None = the blocks of the two sides do not fit together."""
        if not self.world.moves_kv(self.rank, action.handshake.decode_rank):
            return []
        first, end = block_range(
            action.first_token, action.end_token, BLOCK_SIZE, is_last=action.is_last
        )
        cells = []
        for key, sources in self.sources[action.key, action.end_token].items():
            targets = action.handshake.block_ids[key]
            if min(len(sources), len(targets)) < end:
                return None
            for source, target in zip(sources[first:end], targets[first:end], strict=True):
                if target and not source:
                    raise Violation(f"{action.key}: decode wants a block that prefill has freed")
                if target:
                    cells.append({"manager_key": key, "source": source, "block": target})
        return cells

    def _post(self, action: PostBlocks | PostSlot, cells: list[dict[str, Any]] | None) -> None:
        handshake = action.handshake
        write = Write(
            writer=self,
            write_id=action.write_id,
            key=action.key,
            ghost=self.ghosts[action.key],
            target=(handshake.instance_id, handshake.decode_rank),
            target_epoch=handshake.memory.engine["epoch"],
            transfer_id=handshake.transfer_id,
        )
        write.cells = {Cell(write, **cell): None for cell in cells or ()}
        self.writes[action.write_id] = write
        self.world.engine.post(write, is_refused=cells is None)

    def on_write_ended(self, write_id: int, state: WriteState) -> None:
        if self.is_up:
            del self.writes[write_id]
            self.local(self.records.on_write_ended(write_id, state, "simulated"))

    def leftovers(self) -> str:
        records = self.records
        if records.books.num_stashed or records.links.writes or records._ended:
            return "holds stray Handshakes or writes"
        return super().leftovers()


class PrefillTransfer:
    """What a scheduler sees of a node, as a manager shows it."""

    def __init__(self, node: PrefillNode) -> None:
        self.node = node
        self.records = node.records

    def accept(self, key: TransferKey, pair: PinnedPair, *, remaining_ms: int) -> Sequence[Action]:
        return self.node.carry_out(self.records.accept(key, pair, remaining_ms=remaining_ms))

    def refuse(self, key: TransferKey, decode: Peer, reason: str) -> Sequence[Action]:
        return self.node.carry_out(self.records.refuse(key, decode, reason))

    def begin(self, key: TransferKey) -> None:
        self.node.common_log.append(("begin", key))
        self.records.begin(key)

    def send_chunk(self, key: TransferKey, end_token: int, block_ids: BlockIds) -> Sequence[Action]:
        self.node.sources[key, end_token] = block_ids
        return self.node.carry_out(self.records.send_chunk(key, end_token))

    def complete(
        self, key: TransferKey, first_token: FirstToken, block_ids: BlockIds
    ) -> Sequence[Action]:
        self.node.sources[key, first_token.kv_len] = block_ids
        return self.node.carry_out(self.records.complete(key, first_token))

    def finish(self, key: TransferKey, first_token: FirstToken) -> Sequence[Action]:
        return self.node.carry_out(self.records.finish(key, first_token))

    def cancel(self, key: TransferKey) -> Sequence[Action]:
        return self.node.carry_out(self.records.cancel(key))

    def tick(self) -> Sequence[Action]:
        return self.node.carry_out(self.records.decide(self.node.minimum))
