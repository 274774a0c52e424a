"""A simulated decode rank and its memory."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inferkit.core.transfer_messages import TargetMemory
from inferkit.kv_cache.host_store import HostStore
from inferkit.kv_transfer.actions import Action, BlockIds, Fence, Finished, Landed, Send
from inferkit.kv_transfer.decode_record import DecodePhase
from inferkit.kv_transfer.directory import PrefillDirectory
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey
from inferkit.kv_transfer.metadata_slot import SLOT_BYTES, MetadataSlots
from inferkit.kv_transfer.rank_mapping import PrefillServerInfo
from inferkit.scheduler.decode_disagg import DecodeDisaggScheduler
from tests.kv_transfer.sim_bootstrap import Scout
from tests.kv_transfer.sim_engine import Cell
from tests.kv_transfer.sim_nodes import Node
from tests.kv_transfer.sim_requests import Violation

if TYPE_CHECKING:
    from tests.kv_transfer.sim_instance import Instance
    from tests.kv_transfer.world import World


class LateStore(HostStore):
    """Copies a while after it was asked to, as a device does; reads memory as it is then."""

    def __init__(self, node: "DecodeNode", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.node = node

    def _copy_out(self, request_id: int, block_ids: Mapping[str, Sequence[int]]) -> None:
        node = self.node
        held = self._held[request_id]

        def copy() -> None:
            if node.is_up and self._held.get(request_id) is held:
                HostStore._copy_out(self, request_id, block_ids)
                node.records.on_copied(node.keys[request_id])

        node.world.loop.after(node.world.rng.random(), copy)


class DecodeNode(Node):
    scheduler: DecodeDisaggScheduler

    def __init__(self, world: "World", instance: "Instance", rank: int) -> None:
        self.lanes = {sender: lane for lane, sender in enumerate(world.senders(rank))}
        super().__init__(world, instance, rank, num_lanes=len(self.lanes))
        self.slot_memory = bytearray(SLOT_BYTES * instance.num_slots)
        self.fenced: set[int] = set()
        self.directory = PrefillDirectory(
            layout=world.layout(world.plan.decode_tp), tp_rank=rank, decode_id=instance.name
        )
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
        plan = self.world.plan
        tensors = self.model.tensors()
        pool_bytes = sum(tensor[1:].nbytes for (tensor,) in tensors.values())
        num_bytes = -(-pool_bytes * plan.num_host_blocks // instance.num_blocks)
        self.host_store = LateStore(self, caches=tensors, num_bytes=num_bytes or 1)
        self.scheduler = world.decode_scheduler(
            transfer=DecodeTransfer(self),
            host_store=self.host_store,
            num_reserved_decode_tokens=plan.num_reserved_decode_tokens,
            **self.scheduler_parts(),
        )
        self.scout = Scout(self)

    @property
    def slots(self) -> MetadataSlots:
        slots: MetadataSlots = self.records.slots
        return slots

    # -- what this rank hears of prefill -------------------------------------------------------

    def reaches(self, action: Send) -> bool:
        return self.directory.address(action.peer, action.rank) is not None

    def learn(self, info: PrefillServerInfo) -> None:
        replaced, _ = self.directory.learn(info)
        if replaced is not None:
            self.local(self.records.on_peer_gone(replaced))

    def lose(self, peer: Peer) -> None:
        self.directory.lose(peer)
        self.local(self.records.on_peer_gone(peer))

    def find(self, peer: Peer) -> None:
        self.directory.find(peer)
        self.records.on_peer_back(peer)

    # -- memory --------------------------------------------------------------------------------

    def on_broken(self, transfer_id: int) -> None:
        self.records.on_broken(transfer_id)

    def place(self, cell: Cell) -> None:
        """Bytes arrive in this rank's memory."""
        if cell.is_slot:
            start = cell.slot * SLOT_BYTES + cell.offset
            self.slot_memory[start : start + len(cell.data)] = cell.data
        else:
            writer, key = cell.write.writer, cell.manager_key
            lane = self.lanes[writer.rank]
            memory = self.model.memory[key]
            memory[cell.block, :, 0, lane] = writer.model.memory[key][cell.source, :, 0, 0]

    def on_action(self, action: Action) -> None:
        if isinstance(action, Fence):
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

    # -- properties ----------------------------------------------------------------------------

    def look_at(self, action: Action) -> None:
        if not isinstance(action, Landed | Finished):
            return
        ghost = self.ghosts[action.key]
        tokens = {action.status.first_token}
        if isinstance(action, Landed):
            tokens.add(action.slot.first_token)
            self.model.check(self.last_ids[action.key], ghost.prompt, ghost.kv_len)
        if tokens != {ghost.answer[0]}:
            raise Violation(f"{action.key} starts with a first token that is not its own")

    def check(self) -> None:
        super().check()
        self.host_store.check_integrity()

    def lock_step(self) -> tuple[Any, ...]:
        return *super().lock_step(), self.slots._free

    def leftovers(self) -> str:
        if self.slots.num_free != self.slots.num_slots or self.host_store.num_requests:
            return "holds slots or host areas"
        return super().leftovers()


class DecodeTransfer:
    """What a scheduler sees of a node, as a manager shows it."""

    def __init__(self, node: DecodeNode) -> None:
        self.node = node
        self.records = node.records

    @property
    def num_free_slots(self) -> int:
        return self.node.slots.num_free

    def accept(
        self,
        key: TransferKey,
        pair: PinnedPair,
        *,
        bootstrap_url: str,
        kv_len: int,
        seed: int,
        remaining_ms: int,
    ) -> Sequence[Action]:
        actions = self.node.carry_out(
            self.records.accept(key, pair, kv_len=kv_len, seed=seed, remaining_ms=remaining_ms)
        )
        self.node.scout.routes.watch(bootstrap_url, pair.prefill)
        return actions

    def admissible(self) -> Sequence[TransferKey]:
        keys: list[TransferKey] = self.records.admissible()
        return keys

    def admit(self, key: TransferKey, block_ids: BlockIds) -> Sequence[Action]:
        self.node.common_log.append(("admit", key))
        return self.node.carry_out(self.records.admit(key, block_ids))

    def cancel(self, key: TransferKey) -> Sequence[Action]:
        return self.node.carry_out(self.records.cancel(key))

    def complete(self, key: TransferKey) -> Sequence[Action]:
        return self.node.carry_out(self.records.complete(key))

    def retract(self, key: TransferKey) -> None:
        node, scheduler = self.node, self.node.scheduler
        node.common_log.append(("retract", key))
        node.world.num_retracted += 1
        victim = scheduler.request(node.last_ids[key])
        others = [*scheduler.running_requests.values(), *scheduler.retracted_queue.values()]
        if all(scheduler._age(other) >= scheduler._age(victim) for other in others):
            raise Violation(f"{key} is retracted, and no older request goes on for it")
        self.records.retract(key)

    def on_copied(self, key: TransferKey) -> None:
        """The store tells it when it has copied."""

    def resume(self, key: TransferKey) -> Sequence[Action]:
        self.node.common_log.append(("resume", key))
        return self.node.carry_out(self.records.resume(key))

    def tick(self) -> Sequence[Action]:
        return self.node.carry_out(self.records.decide(self.node.minimum))
