"""A random deployment under a virtual clock, with every fault, and the properties it must have.

`World(plan, seed).run()` is one schedule: requests under faults; then silence, in which timers and
local steps alone must release everything; then one more request per pair, which must succeed.
"""

from dataclasses import dataclass, field, replace
from random import Random

from inferkit.core.transfer_messages import (
    Handshake,
    InstanceLayout,
    LayerLayout,
    TransferMessage,
    encode_transfer,
)
from inferkit.kv_transfer.decode_record import DecodePhase
from inferkit.kv_transfer.decode_records import DecodeRecords
from inferkit.kv_transfer.metadata_slot import MetadataSlots
from inferkit.kv_transfer.prefill_record import PrefillPhase
from inferkit.kv_transfer.prefill_records import PrefillRecords
from inferkit.kv_transfer.rank_mapping import TargetRankMapping
from inferkit.kv_transfer.timers import TransferTimers
from inferkit.online.facts import Side
from inferkit.online.router.routed_request import RoutedRequest
from inferkit.scheduler.decode_disagg import DecodeDisaggScheduler
from inferkit.scheduler.prefill_disagg import PrefillDisaggScheduler
from tests.kv_transfer.loop import Loop
from tests.kv_transfer.sim_decode import DecodeNode
from tests.kv_transfer.sim_engine import Cell, Faults, SimEngine, Write
from tests.kv_transfer.sim_instance import Instance
from tests.kv_transfer.sim_nodes import Node
from tests.kv_transfer.sim_prefill import PrefillNode
from tests.kv_transfer.sim_requests import BLOCK_SIZE, Ghost, Violation
from tests.kv_transfer.sim_router import ClientRequest, Router, only

TIMERS = TransferTimers(
    lease_s=3.0,
    transfer_timeout_s=30.0,
    handshake_timeout_s=30.0,
    fence_timeout_s=0.5,
    stash_s=6.0,
    abort_interval_s=0.2,
)
"""A tenth of the defaults: nothing depends on the numbers, and schedules become shorter."""
STARTS_S = 1.5
"""Routers have found the instances."""
BUSY_S = 25.0
DEADLINE_S = 40.0
SILENCE_S = 120.0
"""Longer than every timer together, and than the latest write."""


@dataclass(kw_only=True)
class Plan:
    """What may happen in one schedule."""

    num_prefills: int = 1
    num_decodes: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    num_kv_heads: int = 4
    windows: tuple[int | None, ...] = (None,)
    """Of each layer; None = full attention."""
    prefill_blocks: int = 5
    decode_blocks: int = 7
    num_slots: int = 2
    num_host_blocks: int = 2
    """Of a decode rank, for retracted requests."""
    batch_size: int = 8
    max_prefill_tokens: int = 64
    is_chunked: bool = True
    has_prefix_cache: bool = False
    """Of prefill."""
    num_reserved_decode_tokens: int = 0
    requests: list[ClientRequest] = field(default_factory=list)
    num_routers: int = 1
    jitter_s: float = 0.01
    stalls: float = 0.0
    """Share of ticks that come seconds late."""
    loses: float = 0.0
    loses_first: bool = False
    """Of every kind of message, the first to a rank about a room is lost."""
    doubles: float = 0.0
    late: float = 0.0
    """Share of messages that take up to `late_s`."""
    late_s: float = 20.0
    late_handshakes: float | None = None
    """The same of Handshakes (None = `late`)."""
    http_late: float | None = None
    """The same of Generates and cancels (None = `late`)."""
    writes: Faults = field(default_factory=Faults)
    crashes: list[tuple[float, str, float, int | None]] = field(default_factory=list)
    """(time, instance, seconds until it is back, rank that dies first)."""
    hiccups: list[tuple[float, str, str]] = field(default_factory=list)
    """(time, prefill, decode): probes of prefill fail for a while, so decode thinks it is gone."""
    is_http_silent: bool = True
    """When nothing is heard any more at the end, bootstrap servers are not, either."""
    bootstrap_restarts: list[tuple[float, str]] = field(default_factory=list)
    """(time, prefill): its bootstrap server starts again, empty."""
    first_token: Side = Side.DECODE
    """The leg whose first token the client gets."""
    client_leaves: list[tuple[float, int]] = field(default_factory=list)
    router_lost_at: float | None = None
    is_calm: bool = False
    """No fault at all: every request ends as expected."""
    # Rules that live outside the record tables, for mutations.
    has_unique_attempts: bool = True
    cancels_legs: bool = True
    has_min: bool = True
    registers_again: bool = True


class World:
    def __init__(
        self,
        plan: Plan,
        seed: int,
        *,
        prefill_class: type[PrefillRecords] = PrefillRecords,
        decode_class: type[DecodeRecords] = DecodeRecords,
        slots_class: type[MetadataSlots] = MetadataSlots,
        routed_class: type[RoutedRequest] = RoutedRequest,
        prefill_scheduler: type[PrefillDisaggScheduler] = PrefillDisaggScheduler,
        decode_scheduler: type[DecodeDisaggScheduler] = DecodeDisaggScheduler,
    ) -> None:
        self.plan = plan
        self.prefill_class = prefill_class
        self.decode_class = decode_class
        self.slots_class = slots_class
        self.routed_class = routed_class
        self.prefill_scheduler = prefill_scheduler
        self.decode_scheduler = decode_scheduler
        self.num_retracted = 0
        self.rng = Random(seed)
        self.loop = Loop()
        self.timers = TIMERS
        self.engine = SimEngine(loop=self.loop, rng=self.rng, faults=plan.writes)
        self.is_silent = False
        self.has_faults = True
        self.mapping = TargetRankMapping(
            prefill_tp_size=plan.prefill_tp,
            decode_tp_size=plan.decode_tp,
            num_kv_heads=frozenset({plan.num_kv_heads}),
        )
        moving = self.mapping.runs[plan.num_kv_heads]
        self._senders = {
            decode: [p for p, d in moving if d == decode] for decode in range(plan.decode_tp)
        }
        self._sent: set[tuple[object, ...]] = set()
        self._cut_until: dict[tuple[str, str], float] = {}
        """(prefill, decode) -> until when probes between them fail."""
        self.prefills = [
            Instance(self, f"p{i}", PrefillNode, plan.prefill_tp, num_blocks=plan.prefill_blocks)
            for i in range(plan.num_prefills)
        ]
        self.decodes = [
            Instance(
                self,
                f"d{i}",
                DecodeNode,
                plan.decode_tp,
                num_blocks=plan.decode_blocks,
                num_slots=plan.num_slots,
            )
            for i in range(plan.num_decodes)
        ]
        self.instances = {inst.name: inst for inst in [*self.prefills, *self.decodes]}
        self.by_bootstrap_url = {inst.bootstrap_url: inst for inst in self.prefills}
        self.routers = [Router(self, nonce) for nonce in range(1, plan.num_routers + 1)]
        for instance in self.instances.values():
            instance.start()

    # -- what nodes ask of the world -----------------------------------------------------------

    def senders(self, decode_rank: int) -> list[int]:
        """Prefill ranks whose KV a decode rank holds."""
        return self._senders[decode_rank]

    def layout(self, tp_size: int) -> InstanceLayout:
        layer = LayerLayout(
            layer_idx=0,
            kind="full_attention",
            manager_key="full_attention",
            num_kv_heads=self.plan.num_kv_heads,
            dims=(2, 2),
            dtype="float32",
            block_size=BLOCK_SIZE,
            layout="BnBsND",
        )
        return InstanceLayout(
            model="m",
            model_fingerprint="f",
            transfer_engine="simulated",
            attn_tp_size=tp_size,
            layers=(layer,),
        )

    def moves_kv(self, prefill_rank: int, decode_rank: int) -> bool:
        return prefill_rank in self._senders[decode_rank]

    def is_cut(self, prefill: Instance, decode: Instance) -> bool:
        """Whether a probe gets no answer."""
        until_s = self._cut_until.get((prefill.name, decode.name), 0.0)
        is_silent = self.is_silent and self.plan.is_http_silent
        return is_silent or self.loop.now_s < until_s

    def timer_interval(self) -> float:
        if self.is_silent:
            return self.rng.uniform(1.0, 5.0)
        return self.rng.uniform(0.05, 0.3) if self.has_faults else self.rng.uniform(0.2, 1.0)

    def tick_interval(self, instance: Instance) -> float:
        if self.is_silent:
            return self.rng.uniform(1.0, 5.0)
        if not self.has_faults:
            return self.rng.uniform(0.2, 0.8)
        if self.rng.random() < self.plan.stalls:
            return self.rng.uniform(1.0, 8.0)
        is_idle = not instance.inbox and not any(node.records.records for node in instance.nodes)
        return self.rng.uniform(0.1, 0.5) if is_idle else self.rng.uniform(0.01, 0.1)

    def http_delay(self) -> float:
        late = self.plan.late if self.plan.http_late is None else self.plan.http_late
        if self.has_faults and self.rng.random() < late:
            return self.rng.uniform(0.0, self.plan.late_s)
        return self.rng.uniform(0.0, 0.05)

    def all_reduce_min(self, votes: list[list[int]]) -> list[int]:
        if not self.plan.has_min:
            return votes[0]
        return [min(entries) for entries in zip(*votes, strict=True)]

    def deliver(self, name: str, rank: int, message: TransferMessage) -> None:
        """A control message to whoever lives at an address when it arrives."""
        plan, rng = self.plan, self.rng
        if self.is_silent or (self.has_faults and rng.random() < plan.loses):
            return
        frame = encode_transfer(message)
        late = plan.late
        if isinstance(message, Handshake) and plan.late_handshakes is not None:
            late = plan.late_handshakes
        if self.has_faults and plan.loses_first and self._is_first(name, rank, message):
            return
        copies = 2 if self.has_faults and rng.random() < plan.doubles else 1
        for _ in range(copies):
            is_late = self.has_faults and rng.random() < late
            delay_s = rng.random() * (plan.late_s if is_late else 0.02)
            self.loop.after(delay_s, lambda: self._arrive(name, rank, frame))

    def _is_first(self, name: str, rank: int, message: TransferMessage) -> bool:
        kind = (name, rank, type(message), message.room, getattr(message, "state", None))
        is_first = kind not in self._sent
        self._sent.add(kind)
        return is_first

    def _arrive(self, name: str, rank: int, frame: bytes) -> None:
        nodes = self.instances[name].nodes
        if not self.is_silent and rank < len(nodes) and nodes[rank].is_up:
            nodes[rank].receive(frame)

    # -- lives of instances --------------------------------------------------------------------

    def _crash(self, instance: Instance, back_s: float, rank: int | None) -> None:
        if not instance.is_up:
            return
        epoch = instance.epoch
        if rank is not None:
            instance.crash(rank % instance.num_ranks)
        self.loop.after(
            self.rng.uniform(0.1, 2.0) if rank is not None else 0.0,
            lambda: self._crash_fully(instance, epoch, back_s),
        )

    def _crash_fully(self, instance: Instance, epoch: int, back_s: float) -> None:
        if instance.epoch != epoch:
            return
        instance.crash()
        self.loop.after(back_s, instance.start)

    def _hiccup(self, prefill: Instance, decode: Instance) -> None:
        lasts_s = self.rng.uniform(1.5, 4.0)
        self._cut_until[prefill.name, decode.name] = self.loop.now_s + lasts_s

    # -- the schedule --------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Violation (or an assertion of the code under test) where a property fails."""
        plan = self.plan
        for request in plan.requests:
            router = self.rng.choice(self.routers)
            at_s = STARTS_S + self.rng.random() * (0.2 if self.rng.random() < 0.5 else 10.0)
            if request.starts_at is not None:
                at_s = STARTS_S - 1.0 + request.starts_at
            self.loop.after(at_s, lambda r=router, q=request: r.start(q))
        for at_s, name, back_s, rank in plan.crashes:
            instance = self.instances[name]
            self.loop.after(at_s, lambda i=instance, b=back_s, r=rank: self._crash(i, b, r))
        for at_s, prefill, decode in plan.hiccups:
            pair = (self.instances[prefill], self.instances[decode])
            self.loop.after(at_s, lambda pair=pair: self._hiccup(*pair))
        for at_s, name in plan.bootstrap_restarts:
            self.loop.after(at_s, self.instances[name].restart_bootstrap)
        for at_s, idx in plan.client_leaves:
            request = plan.requests[idx]
            self.loop.after(STARTS_S - 1.0 + at_s, lambda q=request: self._leave(q))
        if plan.router_lost_at is not None:
            self.loop.after(plan.router_lost_at, self.routers[0].lose)
        self.loop.run(BUSY_S, self.check)
        if plan.is_calm:
            self.loop.run(DEADLINE_S, self.check)
            self._check_outcomes()
        self._fall_silent()
        self._recover()

    @staticmethod
    def _leave(request: ClientRequest) -> None:
        if request.router is None:
            request.outcome = request.outcome or "stopped"
        else:
            request.router.stop(request)

    def _check_outcomes(self) -> None:
        for request in self.plan.requests:
            wanted = {"400"} if self._never_fits(request.ghost) else {"ok"}
            if sum(other.room == request.room for other in self.plan.requests) > 1:
                wanted.add("409")
            if request.outcome not in wanted:
                raise Violation(
                    f"without a fault request {request.idx} ends {request.outcome or 'never'}, "
                    f"expected {wanted}: {request.history}"
                )

    def _never_fits(self, ghost: Ghost) -> bool:
        """The whole of it, on either side."""
        return (
            ghost.num_blocks(is_decode=False) > self.plan.prefill_blocks
            or ghost.num_blocks(is_decode=True) > self.plan.decode_blocks
        )

    def _fall_silent(self) -> None:
        self.is_silent = True
        self.has_faults = False
        self.loop.run(self.loop.now_s + SILENCE_S, self.check)
        for instance in self.instances.values():
            for node in instance.nodes:
                if instance.is_up:
                    self._check_quiet(node)
        for request in self.plan.requests:
            if request.router is not None and not request.outcome:
                raise Violation(f"request {request.idx} has no end: {request.history}")

    @staticmethod
    def _check_quiet(node: Node) -> None:
        leftovers = node.leftovers()
        if leftovers:
            where = f"{node.me.instance_id}/{node.rank}"
            raise Violation(f"{where} still {leftovers} after a long silence")

    def _recover(self) -> None:
        """Afterwards every pair serves a request again."""
        self.is_silent = False
        self.plan.writes = self.engine.faults = replace(
            self.plan.writes, late=0.0, fails=0.0, is_lost=0.0
        )
        for instance in self.instances.values():
            if not instance.is_up:
                instance.start()
        router = Router(self, nonce=99)
        self.loop.run(self.loop.now_s + 12.0, self.check)
        for idx, route in enumerate(list(router.pairs.routes)):
            ghost = Ghost(request=1000 + idx, attempt=0, kv_len=3)
            request = ClientRequest(ghost.request, 10_000 + idx, 20.0, ghost, tries_left=0)
            router.start(request, only(route))
            self.loop.run(self.loop.now_s + 21.0, self.check)
            if request.outcome != "ok":
                raise Violation(f"a later request ends {request.outcome}: {request.history}")
        if len(router.pairs.routes) != len(self.prefills) * len(self.decodes):
            raise Violation(f"a router misses instances: {router.registry.missing()}")

    # -- properties ----------------------------------------------------------------------------

    def check(self) -> None:
        """After every event."""
        engine = self.engine
        for cell in engine.cells:
            node = engine.may_land(cell)
            if node is not None:
                self._check_target(cell, node)
        for write in engine.running:
            self._check_source(write)
        if self.loop.num_events % 16 == 0:
            for instance in self.instances.values():
                for node in instance.nodes:
                    self._check_rooms(node)

    @staticmethod
    def _check_rooms(node: Node) -> None:
        """Two routers cannot have a request each active in one room."""
        owner: dict[int, int] = {}
        for key, record in node.records.records.items():
            is_active = record.phase not in (DecodePhase.DRAINING, PrefillPhase.ABORTING)
            if is_active and owner.setdefault(key.room, key.router) != key.router:
                raise Violation(f"room {key.room} is active for requests of two routers")

    @staticmethod
    def _check_target(cell: Cell, node: DecodeNode) -> None:
        """A write that can still land points into memory of the attempt it was posted for."""
        write = cell.write
        record = node.records.records.get(write.key)
        is_open = (
            record is not None
            and node.ghosts[write.key] == write.ghost
            and record.phase in (DecodePhase.ADMITTED, DecodePhase.DRAINING)
            and record.transfer_id == write.transfer_id
            and node.me.epoch == write.target_epoch
        )
        if not is_open:
            raise Violation(f"a write of {write.ghost} may land after its transfer is over")
        is_own = (
            cell.slot == record.slot
            if cell.is_slot
            else node.holds(write.key, cell.manager_key, cell.block)
        )
        if not is_own:
            raise Violation(f"a write of {write.ghost} may land in memory that is not its own")

    @staticmethod
    def _check_source(write: Write) -> None:
        """Source blocks are held while a write of the living process reads them."""
        node = write.writer
        if not node.is_up or not write.cells:
            return
        is_own = node.ghosts[write.key] == write.ghost
        for cell in write.cells:
            if not is_own or not (
                cell.is_slot or node.holds(write.key, cell.manager_key, cell.source)
            ):
                raise Violation(f"source blocks of {write.ghost} are free under a running write")
