"""The transfer manager of a decode rank: what its scheduler talks to."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from inferkit.core.protocols import Clock, FenceState, TransferEngine
from inferkit.core.transfer_messages import (
    DrainAck,
    InstanceLayout,
    Status,
    TransferMessage,
    TransferState,
)
from inferkit.kv_transfer.actions import (
    Action,
    BlockIds,
    CloseTransfer,
    Fence,
    OpenTransfer,
    Send,
)
from inferkit.kv_transfer.decode_record import DecodePhase, DecodeRecord
from inferkit.kv_transfer.decode_records import DecodeRecords
from inferkit.kv_transfer.digest import Side, link_digest, link_heads
from inferkit.kv_transfer.directory import PrefillDirectory
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey
from inferkit.kv_transfer.manager import KVTransferManager
from inferkit.kv_transfer.metadata_slot import MetadataSlots
from inferkit.kv_transfer.rank_mapping import PrefillServerInfo
from inferkit.kv_transfer.rank_memory import RankMemory
from inferkit.kv_transfer.status import AllReduceMin
from inferkit.kv_transfer.timers import TransferTimers

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 60.0
"""Bootstrap servers that requests wait for are named again so often, or they are forgotten."""


BEFORE_LANDING = (DecodePhase.WAITING, DecodePhase.ADMITTED)


def no_watch(url: str, peer: Peer) -> None:
    """Routes come by `learn` alone."""


class DecodeTransferManager(KVTransferManager):
    """`accept`, `admit`, `cancel`, `complete`, `retract` and `resume` are common events: every
    rank of a TP group calls them in the same order with the same arguments, between two calls of
    `tick`. Each returns the actions that concern the scheduler: Landed, Finished, Retracted, End,
    Release. `learn`, `lose`, `find` and `on_copied` are called from any thread.

    Args:
        me: this instance, in this life.
        rank: of this process in its instance.
        layout: of this instance.
        memory: of this rank, registered with the engine; its cells are the metadata slots.
        watch: called with the bootstrap address and the prefill instance of each request; does
            not block.
        others: see KVTransferManager.
    """

    def __init__(
        self,
        *,
        me: Peer,
        rank: int,
        layout: InstanceLayout,
        engine: TransferEngine,
        memory: RankMemory,
        timers: TransferTimers,
        host: str,
        all_reduce_min: AllReduceMin,
        secret: bytes = b"",
        clock: Clock = time.monotonic,
        watch: Callable[[str, Peer], None] = no_watch,
    ) -> None:
        super().__init__(
            engine=engine,
            clock=clock,
            all_reduce_min=all_reduce_min,
            host=host,
            secret=secret,
        )
        self.me = me
        self.rank = rank
        self.layout = layout
        self.memory = memory
        self.timers = timers
        self.watch = watch
        self.tp = (layout.attn_tp_size, rank % layout.attn_tp_size)
        self.directory = PrefillDirectory(
            layout=layout, tp_rank=self.tp[1], decode_id=me.instance_id
        )
        self.slots = MetadataSlots(memory=memory.cell_bytes, num_slots=memory.num_cells)
        self._records: DecodeRecords | None = None
        self._urls: dict[TransferKey, tuple[str, Peer]] = {}
        """Where requests that have not landed learn of whom: bootstrap address, prefill peer."""
        self._next_watch = 0.0
        self._fences: dict[int, Fence] = {}
        """Transfer id -> what the engine is to revoke; in order."""
        self._layouts: dict[Peer, InstanceLayout] = {}
        """Of the lives of prefill instances that are known now."""
        self._digests: dict[tuple[int, int], str] = {}
        """(transfer id, prefill rank) -> digest of what this rank sees of that link."""

    @property
    def records(self) -> DecodeRecords:
        assert self._records is not None, "start() comes first"
        return self._records

    @property
    def table(self) -> DecodeRecords:
        return self.records

    # -- common events -------------------------------------------------------------------------

    def accept(
        self,
        key: TransferKey,
        pair: PinnedPair,
        *,
        bootstrap_url: str,
        kv_len: int,
        seed: int,
        remaining_ms: int,
    ) -> list[Action]:
        """A Generate has come; see DecodeRecords.

        Raises:
            RequestError: this attempt is here already.
        """
        with self._lock:
            actions = self._carry_out(
                self.records.accept(key, pair, kv_len=kv_len, seed=seed, remaining_ms=remaining_ms)
            )
            self._refuse(key, pair.prefill)
        self._urls[key] = bootstrap_url, pair.prefill
        self.watch(bootstrap_url, pair.prefill)
        return actions

    def admissible(self) -> list[TransferKey]:
        """Requests that may take their blocks and a slot, oldest first. Equal on all ranks."""
        with self._lock:
            return self.records.admissible()

    @property
    def num_free_slots(self) -> int:
        """Equal on all ranks between two common events."""
        return self.slots.num_free

    def admit(self, key: TransferKey, block_ids: Mapping[str, Sequence[int]]) -> list[Action]:
        """The request has all its blocks, and a slot is free: prefill may write."""
        blocks: BlockIds = {name: tuple(ids) for name, ids in block_ids.items()}
        return self._common(lambda: self.records.admit(key, blocks))

    def cancel(self, key: TransferKey) -> list[Action]:
        """Nobody waits for the request any more; unknown ones stay as they are."""
        return self._common(lambda: self.records.cancel(key))

    def complete(self, key: TransferKey) -> list[Action]:
        """A running request has ended by itself."""
        return self._common(lambda: self.records.complete(key))

    def retract(self, key: TransferKey) -> list[Action]:
        """A running request is being copied to the host area that it has taken."""
        with self._lock:
            self.records.retract(key)
        return []

    def resume(self, key: TransferKey) -> list[Action]:
        """A retracted request has blocks again, filled from its host area."""
        return self._common(lambda: self.records.resume(key))

    # -- from any thread -----------------------------------------------------------------------

    def on_copied(self, key: TransferKey) -> None:
        """This rank's copy to host memory is complete."""
        with self._lock:
            self.records.on_copied(key)

    def learn(self, info: PrefillServerInfo) -> None:
        """What a bootstrap server says of its prefill instance now."""
        with self._lock:
            former, warnings = self.directory.learn(info)
            self._layouts[info.peer] = info.layout
            left: list[Action] = []
            if former is not None:
                del self._layouts[former]
                left = self._carry_out(self.records.on_peer_gone(former))
            for key, record in self.records.records.items():
                if record.prefill == info.peer:
                    self._refuse(key, info.peer)
        assert not left, f"a local event concerns the scheduler: {left}"
        for warning in warnings:
            logger.warning("%s", warning)

    def lose(self, peer: Peer) -> None:
        """A life of a prefill instance does not answer any more."""
        with self._lock:
            self.directory.lose(peer)
        self._local(lambda: self.records.on_peer_gone(peer))

    def find(self, peer: Peer) -> None:
        """A life that did not answer is back."""
        with self._lock:
            self.directory.find(peer)
            self.records.on_peer_back(peer)

    # -- parts ---------------------------------------------------------------------------------

    def _refuse(self, key: TransferKey, prefill: Peer) -> None:
        """Where the layouts do not fit, waiting is of no use."""
        refusal = self.directory.refusal(prefill)
        if refusal:
            self.records.on_refused_pair(key, refusal)

    def _start(self) -> None:
        dp_rank = self.rank // self.layout.attn_tp_size
        self._records = DecodeRecords(
            me=self.me,
            rank=self.rank,
            reply_address=self.channel.address,
            memory=self.memory.target(
                self.engine.describe(), attn_tp_size=self.layout.attn_tp_size
            ),
            slots=self.slots,
            routes=self.directory.routes,
            clock=self.clock,
            timers=self.timers,
            dp_rank=dp_rank,
            dp_size=self.layout.attn_dp_size,
            content_fault=self._content_fault,
        )

    def _stop(self) -> None:
        """No thread but the listener."""

    def _before_votes(self) -> None:
        """Fences belong to the thread that runs the model: memory may have to be moved."""
        self._watch_again()
        with self._lock:
            fences = list(self._fences.values())
        for fence in fences:
            state = self.engine.fence(fence.transfer_id)
            with self._lock:
                if state is FenceState.RUNNING or self._fences.pop(fence.transfer_id, None) is None:
                    continue
                if state is FenceState.DONE:
                    self.records.on_fenced(fence.transfer_id)
                else:
                    self.records.on_fence_unable(fence.transfer_id)
        broken = self.engine.take_broken()
        with self._lock:
            for transfer_id in broken:
                self.records.on_broken(transfer_id)

    def _watch_again(self) -> None:
        now = self.clock()
        if now < self._next_watch:
            return
        self._next_watch = now + WATCH_INTERVAL_S
        with self._lock:
            records = self.records.records
            self._urls = {
                key: url
                for key, url in self._urls.items()
                if key in records and records[key].phase in BEFORE_LANDING
            }
        for url, peer in set(self._urls.values()):
            self.watch(url, peer)

    def _on_message(self, message: TransferMessage) -> bool:
        if not isinstance(message, Status | DrainAck):
            return False
        if isinstance(message, Status) and message.state is TransferState.OK:
            self._look_at_content(message)
        self._local(lambda: self.records.on_message(message))
        return True

    def _address_of(self, action: Send) -> str | None:
        return self.directory.address(action.peer, action.rank)

    def _do(self, action: Action) -> bool:
        if isinstance(action, OpenTransfer):
            self.engine.open_transfer(action.transfer_id)
        elif isinstance(action, CloseTransfer):
            self._fences.pop(action.transfer_id, None)
            self.engine.close_transfer(action.transfer_id)
        elif isinstance(action, Fence):
            self._fences[action.transfer_id] = action
            logger.warning(
                "transfer %d of prefill %s is fenced: ranks %s did not acknowledge its end",
                action.transfer_id,
                action.peer.instance_id,
                list(action.prefill_ranks),
            )
        else:
            return False
        return True

    # -- digest --------------------------------------------------------------------------------

    def _look_at_content(self, message: Status) -> None:
        """The link has placed everything, so its digest can be made here, without the lock."""
        if not self.layout.verify_digest:
            return
        with self._lock:
            floor = self.records.floor
            self._digests = {k: v for k, v in self._digests.items() if k[0] >= floor}
            record = self.records.records.get(TransferKey.of(message))
            if (
                record is None
                or record.phase is not DecodePhase.ADMITTED
                or record.transfer_id != message.transfer_id
                or message.prefill_rank not in record.all_links
                or record.all_links[message.prefill_rank].is_dummy
                or (message.transfer_id, message.prefill_rank) in self._digests
                or record.prefill not in self._layouts
            ):
                return
            layout = self._layouts[record.prefill]
        digest = self._link_digest(record, layout, message.prefill_rank)
        with self._lock:
            self._digests[message.transfer_id, message.prefill_rank] = digest

    def _content_fault(self, record: DecodeRecord, status: Status) -> str:
        """By the table, under the lock."""
        if not self.layout.verify_digest:
            return ""
        rank = status.prefill_rank
        seen = self._digests.get((record.transfer_id, rank), "not known")
        if seen == status.digest:
            return ""
        return (
            f"what prefill rank {rank} has written is not what arrived: its digest is "
            f"{status.digest or 'missing'}, that of decode rank {self.rank} is {seen}; the "
            "transfer engine or the memory is broken"
        )

    def _link_digest(self, record: DecodeRecord, prefill: InstanceLayout, prefill_rank: int) -> str:
        theirs = {layer.layer_idx for layer in (*prefill.layers, *prefill.mtp_layers)}
        shared = {idx: n for idx, n in self.memory.num_kv_heads.items() if idx in theirs}
        size = prefill.attn_tp_size
        heads = link_heads(shared, prefill_tp=(size, prefill_rank % size), decode_tp=self.tp)
        return link_digest(
            self.memory,
            side=Side.DECODE,
            heads=heads,
            block_ids=record.block_ids,
            wanted=record.block_ids,
            kv_len=record.kv_len,
        )

    def _numbers(self) -> dict[str, int]:
        phases = [record.phase for record in self.records.records.values()]
        return {f"num_{phase}": phases.count(phase) for phase in DecodePhase} | {
            "num_free_slots": self.slots.num_free,
            "num_fencing": len(self._fences),
            "num_quarantined": self.records.num_quarantined,
        }
