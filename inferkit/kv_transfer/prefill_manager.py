"""The transfer manager of a prefill rank: what its scheduler talks to."""

import time
from collections.abc import Callable, Mapping, Sequence

from inferkit.core.protocols import Clock, TransferEngine, WriteState
from inferkit.core.transfer_messages import (
    Handshake,
    LeaseRenew,
    TransferAbort,
    TransferMessage,
)
from inferkit.kv_transfer.actions import (
    Action,
    BlockIds,
    CancelWrites,
    FirstToken,
    PostBlocks,
    PostSlot,
    Release,
    Send,
)
from inferkit.kv_transfer.decode_targets import DecodeTargets, shared_layers
from inferkit.kv_transfer.digest import Side, link_digest, link_heads
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey
from inferkit.kv_transfer.manager import KVTransferManager
from inferkit.kv_transfer.prefill_record import PrefillPhase
from inferkit.kv_transfer.prefill_records import PrefillRecords
from inferkit.kv_transfer.rank_memory import RankMemory
from inferkit.kv_transfer.status import AllReduceMin
from inferkit.kv_transfer.timers import TransferTimers
from inferkit.kv_transfer.write_thread import Order, Source, WriteThread

IDLE_LEASES = 10
"""A decode rank that nothing was written to for so many leases is disconnected."""


class PrefillTransferManager(KVTransferManager):
    """`accept`, `refuse`, `begin`, `send_chunk`, `complete`, `finish` and `cancel` are common
    events: every rank of a TP group calls them in the same order with the same arguments, between
    two calls of `tick`. Each returns the actions that concern the scheduler: Ready, End, Release.

    Args:
        me: this instance, in this life.
        rank: of this process in its instance.
        attn_tp_size: ranks that share a request.
        memory: of this rank, registered with the engine.
        verify_digest: tell decode a digest of what was written.
        others: see KVTransferManager.
    """

    def __init__(
        self,
        *,
        me: Peer,
        rank: int,
        attn_tp_size: int,
        engine: TransferEngine,
        memory: RankMemory,
        timers: TransferTimers,
        host: str,
        all_reduce_min: AllReduceMin,
        secret: bytes = b"",
        clock: Clock = time.monotonic,
        verify_digest: bool = False,
    ) -> None:
        super().__init__(
            engine=engine,
            clock=clock,
            all_reduce_min=all_reduce_min,
            host=host,
            secret=secret,
        )
        self.memory = memory
        self.tp = (attn_tp_size, rank % attn_tp_size)
        self.verify_digest = verify_digest
        self.records = PrefillRecords(
            me=me, rank=rank, clock=clock, timers=timers, digest=self._digest
        )
        targets = DecodeTargets(
            engine=engine,
            memory=memory,
            tp=self.tp,
            clock=clock,
            idle_s=IDLE_LEASES * timers.lease_s,
        )
        self.writes = WriteThread(
            engine=engine,
            memory=memory,
            targets=targets,
            on_ended=self._on_write_ended,
            on_failure=self._fail,
        )
        self._sources: dict[TransferKey, Source] = {}
        self._digests: dict[tuple[Peer, int, int], str] = {}
        """(decode life, rank, transfer id) of links whose last write has just ended."""

    @property
    def table(self) -> PrefillRecords:
        return self.records

    # -- common events -------------------------------------------------------------------------

    def accept(self, key: TransferKey, pair: PinnedPair, *, remaining_ms: int) -> list[Action]:
        """A Generate has come; see PrefillRecords.

        Raises:
            RequestError: this attempt is here already.
        """
        return self._common(lambda: self.records.accept(key, pair, remaining_ms=remaining_ms))

    def refuse(self, key: TransferKey, decode: Peer, reason: str) -> list[Action]:
        """Answer a Generate that can never run here; decode is told."""
        return self._common(lambda: self.records.refuse(key, decode, reason))

    def begin(self, key: TransferKey) -> list[Action]:
        """A ready request has taken its blocks and is computed from now on."""
        with self._lock:
            self.records.begin(key)
        return []

    def is_sending(self, key: TransferKey) -> bool:
        """Whether computing the request is still of use. Equal on all ranks between two ticks."""
        with self._lock:
            return self.records.is_sending(key)

    def send_chunk(
        self, key: TransferKey, end_token: int, block_ids: Mapping[str, Sequence[int]]
    ) -> list[Action]:
        """KV of tokens [.., end_token) is computed and lies in these blocks."""
        return self._with_blocks(key, block_ids, 0, lambda: self.records.send_chunk(key, end_token))

    def complete(
        self,
        key: TransferKey,
        first_token: FirstToken,
        block_ids: Mapping[str, Sequence[int]],
    ) -> list[Action]:
        """The whole prompt is computed: send what is left, then the first token."""
        return self._with_blocks(
            key, block_ids, first_token.kv_len, lambda: self.records.complete(key, first_token)
        )

    def finish(self, key: TransferKey, first_token: FirstToken) -> list[Action]:
        """The first token ends the request: nothing more is sent."""
        return self._common(lambda: self.records.finish(key, first_token))

    def cancel(self, key: TransferKey) -> list[Action]:
        """Nobody waits for the request any more; unknown ones stay as they are."""
        return self._common(lambda: self.records.cancel(key))

    # -- parts ---------------------------------------------------------------------------------

    def _with_blocks(
        self,
        key: TransferKey,
        block_ids: Mapping[str, Sequence[int]],
        kv_len: int,
        call: Callable[[], list[Action]],
    ) -> list[Action]:
        blocks: BlockIds = {name: tuple(ids) for name, ids in block_ids.items()}
        with self._lock:
            if self.records.is_sending(key):
                self._sources[key] = Source(blocks, kv_len)
            return self._carry_out(call())

    def _start(self) -> None:
        self.writes.start()

    def _stop(self) -> None:
        self.writes.close()

    def _before_votes(self) -> None:
        """Nothing: nobody writes into a prefill rank."""

    def _on_message(self, message: TransferMessage) -> bool:
        if not isinstance(message, Handshake | LeaseRenew | TransferAbort):
            return False
        self._local(lambda: self.records.on_message(message))
        return True

    def _address_of(self, action: Send) -> str | None:
        return action.reply_address

    def _do(self, action: Action) -> bool:
        if isinstance(action, PostBlocks | PostSlot):
            self.writes.order(Order(action, self._sources[action.key]))
        elif isinstance(action, CancelWrites):
            self.writes.cancel(action.write_ids)
        else:
            if isinstance(action, Release):
                self._sources.pop(action.key, None)
            return False
        return True

    def _on_write_ended(self, order: Order, state: WriteState, error: str) -> None:
        post = order.post
        is_last = isinstance(post, PostSlot) and post.offset == 0
        if self.verify_digest and is_last and state is WriteState.DONE:
            # Before the table is told, since the blocks are held until then; without the lock.
            self._digests[_link(post.handshake)] = self._link_digest(post.handshake, order.source)
        self._local(lambda: self.records.on_write_ended(post.write_id, state, error))
        self._digests.pop(_link(post.handshake), None)  # the record has failed meanwhile

    def _digest(self, key: TransferKey, handshake: Handshake) -> str:
        """By the table, under the lock; "" for a link that moves nothing."""
        return self._digests.pop(_link(handshake), "")

    def _link_digest(self, handshake: Handshake, source: Source) -> str:
        size = handshake.memory.attn_tp_size
        heads = link_heads(
            shared_layers(self.memory, handshake.memory),
            prefill_tp=self.tp,
            decode_tp=(size, handshake.decode_rank % size),
        )
        return link_digest(
            self.memory,
            side=Side.PREFILL,
            heads=heads,
            block_ids=source.block_ids,
            wanted=handshake.block_ids,
            kv_len=source.kv_len,
        )

    def _numbers(self) -> dict[str, int]:
        phases = [record.phase for record in self.records.records.values()]
        return {f"num_{phase}": phases.count(phase) for phase in PrefillPhase} | {
            "num_stashed": self.records.books.num_stashed,
            "num_tombstones": self.records.books.num_tombstones,
            "num_writes_queued": self.writes.num_queued,
            "num_writes_in_flight": self.writes.num_in_flight,
        }


def _link(handshake: Handshake) -> tuple[Peer, int, int]:
    return Peer.sender_of(handshake), handshake.decode_rank, handshake.transfer_id
