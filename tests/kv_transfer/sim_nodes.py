"""Ranks and instances of a simulated deployment.

A node owns the real record tables of one rank and does what a manager and a scheduler would do:
it carries out actions, takes and frees blocks, and moves requests on. An instance ticks its nodes
in lock step, as a worker loop does: events from the leader, votes, MIN over all ranks, decisions,
one scheduling step; each rank at its own time within the tick.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inferkit.core.errors import RequestError
from inferkit.core.protocols import WriteState
from inferkit.core.transfer_messages import TargetMemory, TransferMessage, decode_transfer
from inferkit.kv_transfer.actions import (
    Action,
    CancelWrites,
    Code,
    End,
    Fence,
    Finished,
    FirstToken,
    Landed,
    PostBlocks,
    PostSlot,
    Ready,
    Release,
    Retracted,
    Send,
)
from inferkit.kv_transfer.decode_record import DecodePhase
from inferkit.kv_transfer.directory import PrefillDirectory
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey
from inferkit.kv_transfer.metadata_slot import SLOT_BYTES, MetadataSlots
from inferkit.kv_transfer.prefill_record import PrefillPhase
from inferkit.kv_transfer.rank_mapping import PrefillServerInfo
from tests.kv_transfer.sim_engine import Cell, Write

if TYPE_CHECKING:
    from tests.kv_transfer.world import World

KEY = "full_attention"
BLOCK_SIZE = 4


class Violation(AssertionError):
    """A property of protocol.md section 7 does not hold."""


@dataclass(frozen=True)
class Ghost:
    """What a request really is; the protocol never sees it."""

    request: int
    attempt: int
    kv_len: int
    num_chunks: int = 1
    finishes: bool = False
    """The first token ends it."""
    is_refused: bool = False
    """Prefill answers 400."""
    never_fits: bool = False
    """Decode answers 400."""
    num_steps: int = 2
    """Decode steps until it is complete."""

    @property
    def num_blocks(self) -> int:
        return -(-self.kv_len // BLOCK_SIZE)

    @property
    def first_token(self) -> int:
        return zlib.crc32(repr((self.request, self.kv_len)).encode()) % 50_000


@dataclass(frozen=True)
class Generate:
    """One leg of an attempt."""

    key: TransferKey
    pair: PinnedPair
    ghost: Ghost
    remaining_ms: int


@dataclass(frozen=True)
class Cancel:
    key: TransferKey


@dataclass
class Pool:
    """Blocks 1..size of one rank."""

    size: int
    free: list[int] = field(default_factory=list)
    held: dict[TransferKey, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.size + 1))

    def take(self, key: TransferKey, num: int) -> tuple[int, ...]:
        assert key not in self.held, f"{key} takes blocks twice"
        self.held[key] = tuple(self.free[:num])
        del self.free[:num]
        return self.held[key]

    def give_back(self, key: TransferKey) -> None:
        if key not in self.held:
            raise Violation(f"{key} gives back blocks that it does not hold")
        self.free += self.held.pop(key)

    def check(self) -> None:
        held = [block for blocks in self.held.values() for block in blocks]
        if sorted(held + self.free) != list(range(1, self.size + 1)):
            raise Violation(f"pool: held {held} and free {self.free} are not 1..{self.size}")


class Node:
    """One rank in one life."""

    def __init__(self, world: "World", instance: "Instance", rank: int) -> None:
        self.world = world
        self.instance = instance
        self.rank = rank
        self.me = Peer(instance.name, instance.epoch)
        self.is_up = True
        self.pool = Pool(instance.num_blocks)
        self.ghosts: dict[TransferKey, Ghost] = {}
        self.common_log: list[tuple[Any, ...]] = []
        """What all ranks must do alike, in order."""
        self.records: Any = None
        world.loop.after(world.rng.random() * 0.2, self._timers)

    def on_message(self, message: TransferMessage) -> None:
        self.carry_out(self.records.on_message(message))

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            elif isinstance(action, End):
                self.common_log.append((action.key, action.code))
                if self.rank == 0:
                    self.instance.answer(action.key, action.code)
            elif isinstance(action, Release):
                self.common_log.append((action.key, action.blocks, action.host_area))
                if action.blocks:
                    self.pool.give_back(action.key)
                self.on_release(action)
            else:
                self.on_action(action)

    def _send(self, action: Send) -> None:
        self.world.deliver(action.peer.instance_id, action.rank, action.message)

    def _timers(self) -> None:
        if self.is_up:
            self.carry_out(self.records.tick())
            self.world.loop.after(self.world.timer_interval(), self._timers)

    def apply(self, event: Generate | Cancel) -> None:
        if isinstance(event, Cancel):
            self.carry_out(self.records.cancel(event.key))
        else:
            self.ghosts[event.key] = event.ghost
            try:
                self.on_generate(event)
            except RequestError:
                if self.rank == 0:
                    self.instance.answer(event.key, Code.CONFLICT)

    def on_generate(self, event: Generate) -> None: ...
    def on_action(self, action: Action) -> None: ...
    def on_release(self, action: Release) -> None: ...
    def schedule(self, draw: float) -> None: ...


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
            if key not in records or records[key].phase is not PrefillPhase.SENDING:
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


class Instance:
    """An address where one instance lives, one life after the other."""

    def __init__(
        self,
        world: "World",
        name: str,
        node_class: type[Node],
        num_ranks: int,
        *,
        num_blocks: int,
        num_slots: int = 0,
        num_host_areas: int = 1,
    ) -> None:
        self.world = world
        self.name = name
        self.node_class = node_class
        self.num_ranks = num_ranks
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.num_host_areas = num_host_areas
        self.epoch = 0
        self.nodes: list[Node] = []
        self.inbox: list[Generate | Cancel] = []
        self.legs: dict[TransferKey, Any] = {}
        """Open HTTP connections, to whoever waits for the answer."""
        self.streamed: set[TransferKey] = set()

    @property
    def is_up(self) -> bool:
        return bool(self.nodes) and all(node.is_up for node in self.nodes)

    @property
    def peer(self) -> Peer:
        return Peer(self.name, self.epoch)

    def start(self) -> None:
        self.epoch = self.world.rng.getrandbits(64)
        self.nodes = [self.node_class(self.world, self, rank) for rank in range(self.num_ranks)]
        self.inbox.clear()
        self.streamed.clear()
        self._tick_later(self.epoch)

    def crash(self, rank: int | None = None) -> None:
        """One rank dies, or all; an instance without one of its ranks ticks no more."""
        for node in self.nodes:
            if node.is_up and rank in (None, node.rank):
                node.is_up = False
                self.world.engine.writer_dies(node)
                self.world.engine.target_dies((self.name, node.rank))
        if rank is None:
            legs, self.legs = self.legs, {}
            for key, leg in legs.items():
                leg(key, Code.UNAVAILABLE)

    # -- HTTP ----------------------------------------------------------------------------------

    def post(self, event: Generate, leg: Any) -> None:
        """A Generate arrives; `leg(key, code)` takes the answer."""
        if not self.is_up:
            leg(event.key, Code.UNAVAILABLE)
            return
        self.legs[event.key] = leg
        self.inbox.append(event)

    def close(self, key: TransferKey) -> None:
        """The client of a leg has gone."""
        if self.legs.pop(key, None) is not None:
            self.inbox.append(Cancel(key))

    def answer(self, key: TransferKey, code: Code) -> None:
        if key in self.streamed and code not in (Code.OK, Code.CANCELLED):
            raise Violation(f"{key} streams already and is ended with {code}")
        leg = self.legs.pop(key, None)
        if leg is not None:
            leg(key, code)

    def stream(self, key: TransferKey) -> None:
        self.streamed.add(key)
        if key in self.legs:
            self.legs[key](key, None)

    # -- the loop ------------------------------------------------------------------------------

    def _tick_later(self, epoch: int) -> None:
        self.world.loop.after(self.world.tick_interval(self), lambda: self._tick(epoch))

    def _tick(self, epoch: int) -> None:
        if self.epoch != epoch or not self.is_up:
            return
        events, self.inbox = self.inbox, []
        draw = self.world.rng.random()
        nodes, votes = self.nodes, {}
        jitter_s = self.world.plan.jitter_s

        def vote(node: Node) -> None:
            if not node.is_up:
                return
            for event in events:
                node.apply(event)
            votes[node.rank] = node.records.votes()
            if len(votes) == len(nodes):
                minimum = self.world.all_reduce_min([votes[n.rank] for n in nodes])
                for other in nodes:
                    self.world.loop.after(
                        self.world.rng.random() * jitter_s,
                        lambda other=other: decide(other, minimum),
                    )

        def decide(node: Node, minimum: list[int]) -> None:
            if not node.is_up:
                return
            node.carry_out(node.records.decide(minimum))
            node.schedule(draw)
            del votes[node.rank]
            if not votes:
                self._check_lock_step()
                self._tick_later(epoch)

        for node in nodes:
            self.world.loop.after(self.world.rng.random() * jitter_s, lambda node=node: vote(node))

    def _check_lock_step(self) -> None:
        first = self.nodes[0]
        for node in self.nodes[1:]:
            if node.common_log != first.common_log or node.pool.held != first.pool.held:
                raise Violation(f"ranks of {self.name} are not in lock step")
            node.common_log.clear()
        first.common_log.clear()


def receive(node: Node, frame: bytes) -> None:
    node.on_message(decode_transfer(frame))
