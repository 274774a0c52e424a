"""The hand-off as one decode rank sees it: a state machine per (room, attempt).

    WAITING --route, blocks, slot--> ADMITTED --KV, slot, Status--> RUNNING <-> COPYING, RETRACTED
       |                                |  |                           |
       |                                |  '-- first token ended it -> over <- complete, cancel
       '--> over <-- DRAINING <---------'

Phases are common to all ranks of a group: they change by `decide`, and by `accept`, `admit`,
`cancel`, `complete`, `retract` and `resume`, which every rank calls in the same order with the
same arguments; so blocks are taken and freed alike on all ranks. Messages, the slot, timers and
fences reach one rank and change only its links and its vote.

Opens nothing and starts nothing. Not thread-safe: the owner serialises all calls, and carries out
the actions of each before the next.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from inferkit.core.errors import RequestError
from inferkit.core.messages import Message
from inferkit.core.protocols import Clock
from inferkit.core.transfer_messages import Status, TargetMemory, ToDecodeRank, TransferState
from inferkit.kv_transfer.actions import (
    Action,
    BlockIds,
    CloseTransfer,
    Code,
    End,
    Fence,
    Finished,
    Landed,
    OpenTransfer,
    Outbox,
    Release,
    Retracted,
)
from inferkit.kv_transfer.decode_links import DecodeLinks
from inferkit.kv_transfer.decode_record import ACTIVE, DecodeLink, DecodePhase, DecodeRecord
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey, is_rival
from inferkit.kv_transfer.landing import ContentFault, Landing, LandingError
from inferkit.kv_transfer.metadata_slot import MetadataSlots, SlotPayload
from inferkit.kv_transfer.rank_mapping import LinkTarget
from inferkit.kv_transfer.status import KVStatus, Vote, decode_votes, encode_votes
from inferkit.kv_transfer.timers import TransferTimers

logger = logging.getLogger(__name__)

Routes = Callable[[Peer, int], Sequence[LinkTarget] | None]
"""(prefill peer, room) -> the prefill ranks of this decode rank; None = not known yet."""

OTHER_RANK = "it failed on another rank"


class DecodeRecords:
    """All hand-offs of one decode rank.

    Args:
        me: this instance, in this life.
        rank: of this process in its instance; the "D rank" of the messages.
        reply_address: where this rank receives Status and DrainAck.
        memory: where prefill ranks write.
        slots: this rank's metadata slots; taken and given back here.
        dp_rank, dp_size: so that the transfer ids of an instance differ.
    """

    def __init__(
        self,
        *,
        me: Peer,
        rank: int,
        reply_address: str,
        memory: TargetMemory,
        slots: MetadataSlots,
        routes: Routes,
        clock: Clock,
        timers: TransferTimers,
        dp_rank: int = 0,
        dp_size: int = 1,
        content_fault: ContentFault = lambda record, status: "",
    ) -> None:
        self.me = me
        self.slots = slots
        self.routes = routes
        self.clock = clock
        self.timers = timers
        self.records: dict[TransferKey, DecodeRecord] = {}
        """In order of acceptance, which is the order of votes."""
        self.num_dropped: Counter[str] = Counter()
        """Messages that had no effect, by cause."""
        self.landing = Landing(slots=slots, content_fault=content_fault)
        self.outbox = Outbox()
        self.links = DecodeLinks(
            me=me,
            rank=rank,
            reply_address=reply_address,
            memory=memory,
            clock=clock,
            outbox=self.outbox,
        )
        self._next_id, self._id_step = dp_rank + 1, dp_size
        self._open: dict[int, DecodeRecord] = {}
        """Transfer id -> record that is admitted or draining; in ascending order."""
        self._gone: set[Peer] = set()
        self._next_renewal = clock() + timers.renew_interval_s

    @property
    def floor(self) -> int:
        """The smallest transfer id that is not over; only grows."""
        return next(iter(self._open), self._next_id)

    @property
    def num_quarantined(self) -> int:
        """Transfers whose blocks wait for a DrainAck only, since the engine cannot fence."""
        return sum(record.is_quarantined for record in self._open.values())

    # -- common events: every rank, same order, same arguments ---------------------------------

    def accept(
        self, key: TransferKey, pair: PinnedPair, *, kv_len: int, seed: int, remaining_ms: int
    ) -> list[Action]:
        """A Generate has come. It may be answered at once with End; then there is no record.

        Raises:
            RequestError: this attempt is here already; attempts are never used twice.
        """
        if key in self.records:
            raise RequestError(f"room={key.room} attempt={key.attempt} was used before")
        rivals = (key for key, record in self.records.items() if record.phase in ACTIVE)
        if pair.decode != self.me:
            self._answer(key, Code.UNAVAILABLE, f"the request is for epoch {pair.decode.epoch}")
        elif any(is_rival(key, other) for other in rivals):
            self._answer(key, Code.CONFLICT, f"room {key.room} is active for another request")
        else:
            deadline = self.clock() + remaining_ms / 1000
            self.records[key] = DecodeRecord(key, pair.prefill, kv_len, seed, deadline)
        return self.outbox.take()

    def admissible(self) -> list[TransferKey]:
        """Requests that may take their blocks and a slot, oldest first. Equal on all ranks."""
        return [record.key for record in self.records.values() if record.is_admissible]

    def admit(self, key: TransferKey, block_ids: BlockIds) -> list[Action]:
        """The request has all its blocks; takes a slot and tells prefill.

        The owner looks at `slots.num_free` before it takes blocks: both or nothing.
        """
        record = self.records[key]
        assert record.is_admissible, f"admit() of a record that is {record.phase}"
        slot = self.slots.take()
        assert slot is not None, "admit() without a free slot"
        now = self.clock()
        record.phase, record.is_admissible = DecodePhase.ADMITTED, False
        record.block_ids, record.slot = block_ids, slot
        record.transfer_id, self._next_id = self._next_id, self._next_id + self._id_step
        record.give_up_at = now + self.timers.transfer_timeout_s
        self._open[record.transfer_id] = record
        self.outbox.add(OpenTransfer(record.transfer_id))
        targets = self.routes(record.prefill, key.room)
        if targets is None:
            # It was there at the last vote, so perhaps only this rank has lost it.
            self._fail(record, "the route to prefill is lost")
        for target in targets or ():
            link = DecodeLink(target, renewed_at=now)
            record.all_links[target.prefill_rank] = link
            self.links.send_handshake(record, link, self.floor)
        return self.outbox.take()

    def cancel(self, key: TransferKey) -> list[Action]:
        """Nobody waits for the request any more; unknown and draining ones stay as they are."""
        record = self.records.get(key)
        if record is None or record.is_cancelled:
            return []
        if record.phase is DecodePhase.ADMITTED:
            self._drain(record, Code.CANCELLED, "cancelled")
        elif record.phase is DecodePhase.COPYING:
            # The copy reads the blocks; they are freed when it has ended on every rank.
            record.is_cancelled = True
            self._answer(key, Code.CANCELLED)
        elif record.phase is not DecodePhase.DRAINING:
            self._answer(key, Code.CANCELLED)
            self._release(record)
        return self.outbox.take()

    def complete(self, key: TransferKey) -> list[Action]:
        """A running request has ended by itself."""
        record = self.records[key]
        assert record.phase is DecodePhase.RUNNING, f"complete() of a record that is {record.phase}"
        self._answer(key, Code.OK)
        self._release(record)
        return self.outbox.take()

    def retract(self, key: TransferKey) -> None:
        """A running request is being copied to the host area that it has taken."""
        record = self.records[key]
        assert record.phase is DecodePhase.RUNNING, f"retract() of a record that is {record.phase}"
        record.phase, record.is_copied = DecodePhase.COPYING, False

    def resume(self, key: TransferKey) -> list[Action]:
        """A retracted request has blocks again, and they are filled from its host area."""
        record = self.records[key]
        assert record.phase is DecodePhase.RETRACTED, f"resume() of one that is {record.phase}"
        record.phase = DecodePhase.RUNNING
        self.outbox.add(Release(key, host_area=True))
        return self.outbox.take()

    def votes(self) -> list[int]:
        """This rank's part of the MIN all-reduce; looks at the slots.

        `is_settled` of a vote: in ADMITTED, prefill ended the request at its first token; in
        COPYING, this rank's copy is complete; in DRAINING, no write can land here any more.
        """
        return encode_votes(self.records, [self._vote(rec) for rec in self.records.values()])

    def decide(self, minimum: Sequence[int]) -> list[Action]:
        """Act on the minimum of all ranks' votes, which were given since the last common event."""
        votes = decode_votes(minimum)
        for record, vote in zip(list(self.records.values()), votes, strict=True):
            self._decide(record, vote)
        return self.outbox.take()

    # -- local events --------------------------------------------------------------------------

    def on_message(self, message: ToDecodeRank) -> list[Action]:
        record = self._open.get(message.transfer_id)
        if message.peer_epoch != self.me.epoch:
            self._drop("peer_epoch", message)
        elif record is None or TransferKey.of(message) != record.key:
            self._drop("over", message)
        elif Peer.sender_of(message) != record.prefill:
            self._drop("not_pinned", message)
        elif message.prefill_rank not in record.all_links:
            self._drop("no_link", message)
        elif isinstance(message, Status):
            self._on_status(record, record.all_links[message.prefill_rank], message)
        elif record.phase is DecodePhase.DRAINING:
            record.all_links[message.prefill_rank].is_drained = True
        else:
            self._drop("not_aborted", message)
        return self.outbox.take()

    def on_refused_pair(self, key: TransferKey, reason: str) -> None:
        """The layouts of the pair do not fit; the request cannot be served by it."""
        record = self.records.get(key)
        if record is not None and record.phase is DecodePhase.WAITING:
            self._fail(record, reason)

    def on_copied(self, key: TransferKey) -> None:
        """This rank's copy to host memory is complete."""
        self.records[key].is_copied = True

    def on_fenced(self, transfer_id: int) -> None:
        """The engine has fenced the transfer: no write of it lands here any more."""
        record = self._open.get(transfer_id)
        if record is not None:
            record.is_fenced = True

    def on_fence_unable(self, transfer_id: int) -> None:
        """The engine cannot fence: the blocks stay in quarantine until every DrainAck is here."""
        record = self._open.get(transfer_id)
        if record is not None:
            record.is_quarantined = True
            logger.error(
                "room=%d attempt=%d blocks are in quarantine: the transfer engine cannot fence",
                *record.key,
            )

    def on_broken(self, transfer_id: int) -> None:
        """A fence of another transfer has ended this one too; it is not drained by that.

        Told before the next `votes`: bytes may be lost although prefill reports them placed.
        """
        record = self._open.get(transfer_id)
        if record is not None:
            self._fail(record, "another transfer of the same prefill instance was fenced")

    def on_peer_gone(self, peer: Peer) -> list[Action]:
        """A life of a prefill instance is unreachable, or another has taken its place.

        That is no proof that its writes are over: it only brings the fences forward.
        """
        self._gone.add(peer)
        now = self.clock()
        for record in self._open.values():
            if record.prefill == peer:
                record.fence_at = min(record.fence_at, now)
                self._fail(record, f"prefill {peer.instance_id} is gone")
        return self.outbox.take()

    def on_peer_back(self, peer: Peer) -> None:
        """A life that was unreachable answers again."""
        self._gone.discard(peer)

    def tick(self) -> list[Action]:
        """Look at the timers; called about every 100 ms, independent of scheduling."""
        now = self.clock()
        for record in self.records.values():
            if record.phase is DecodePhase.DRAINING:
                self._press_drain(record, now)
            elif not record.fault:
                fault = self._expired(record, now)
                if fault:
                    self._fail(record, fault)
        if now >= self._next_renewal:
            self._next_renewal = now + self.timers.renew_interval_s
            admitted = [r for r in self._open.values() if r.phase is DecodePhase.ADMITTED]
            self.links.renew(admitted, self.floor)
        return self.outbox.take()

    # -- decisions -----------------------------------------------------------------------------

    def _vote(self, record: DecodeRecord) -> Vote:
        match record.phase:
            case DecodePhase.DRAINING:
                return Vote(KVStatus.FAILED, is_settled=record.is_drained)
            case DecodePhase.COPYING:
                return Vote(KVStatus.SUCCESS, is_settled=record.is_copied)
            case DecodePhase.RUNNING | DecodePhase.RETRACTED:
                return Vote(KVStatus.SUCCESS)
            case _ if record.fault:
                return Vote(KVStatus.FAILED)
            case DecodePhase.WAITING:
                is_known = self.routes(record.prefill, record.key.room) is not None
                return Vote(KVStatus.WAITING_FOR_INPUT if is_known else KVStatus.BOOTSTRAPPING)
        if record.has_all(TransferState.FINISHED):
            return Vote(KVStatus.TRANSFERRING, is_settled=True)
        if self._landed(record) is not None:
            return Vote(KVStatus.SUCCESS)
        return Vote(KVStatus.FAILED if record.fault else KVStatus.TRANSFERRING)

    def _decide(self, record: DecodeRecord, vote: Vote) -> None:
        match record.phase:
            case DecodePhase.WAITING:
                record.is_admissible = vote.status is KVStatus.WAITING_FOR_INPUT
                if vote.status is KVStatus.FAILED:
                    self._answer(record.key, Code.UNAVAILABLE, record.fault or OTHER_RANK)
                    self._release(record)
            case DecodePhase.ADMITTED if vote.is_settled:
                self.outbox.add(Finished(record.key, _any_status(record)))
                self._answer(record.key, Code.OK)
                self._release(record)
            case DecodePhase.ADMITTED if vote.status is KVStatus.SUCCESS:
                self._land(record)
            case DecodePhase.ADMITTED if vote.status is KVStatus.FAILED:
                self._drain(record, Code.UNAVAILABLE, record.fault or OTHER_RANK)
            case DecodePhase.COPYING if vote.is_settled and record.is_cancelled:
                self._release(record)
            case DecodePhase.COPYING if vote.is_settled:
                record.phase = DecodePhase.RETRACTED
                self.outbox.add(Release(record.key, blocks=True))
                self.outbox.add(Retracted(record.key))
            case DecodePhase.DRAINING if vote.is_settled:
                self._release(record)

    def _landed(self, record: DecodeRecord) -> SlotPayload | None:
        """What has landed on this rank; a disagreement fails the record."""
        try:
            return self.landing.payload(record)
        except LandingError as error:
            self._fail(record, str(error))
            return None

    def _land(self, record: DecodeRecord) -> None:
        """The lease ends here: neither a peer nor a timer touches the request any more."""
        payload = self._landed(record)
        assert payload is not None, "a vote for SUCCESS is never taken back"
        self.outbox.add(Landed(record.key, payload, _any_status(record)))
        self._close(record)
        record.phase, record.fault = DecodePhase.RUNNING, ""

    def _drain(self, record: DecodeRecord, code: Code, reason: str) -> None:
        """Common: the client is answered; blocks wait for every link's DrainAck, or a fence."""
        self._fail(record, reason)
        self._answer(record.key, code, reason)
        now = self.clock()
        record.phase = DecodePhase.DRAINING
        is_gone = record.prefill in self._gone
        record.fence_at = now if is_gone else now + self.timers.fence_timeout_s
        record.next_abort_at = now
        self._press_drain(record, now)

    def _press_drain(self, record: DecodeRecord, now: float) -> None:
        """Repeat the abort; where no answer comes, ask for a fence."""
        waiting = [link for link in record.links if not link.is_drained]
        if record.is_fenced or not waiting:
            return
        if now >= record.next_abort_at:
            record.next_abort_at = now + self.timers.abort_interval_s
            for link in waiting:
                self.links.send_abort(record, link)
        if now >= record.fence_at and not record.is_fencing:
            record.is_fencing = True
            ranks = tuple(link.target.prefill_rank for link in waiting)
            self.outbox.add(Fence(record.transfer_id, record.prefill, ranks))

    def _release(self, record: DecodeRecord) -> None:
        """The record is over: give back what its phase holds."""
        has_blocks = record.phase not in (DecodePhase.WAITING, DecodePhase.RETRACTED)
        has_host = record.phase in (DecodePhase.COPYING, DecodePhase.RETRACTED)
        if record.transfer_id in self._open:
            self._close(record)
        if has_blocks or has_host:
            self.outbox.add(Release(record.key, blocks=has_blocks, host_area=has_host))
        del self.records[record.key]

    def _close(self, record: DecodeRecord) -> None:
        """The transfer is over, so its slot is free and the floor may rise."""
        assert record.slot is not None, "an open transfer has a slot"
        self.slots.give_back(record.slot)
        record.slot = None
        del self._open[record.transfer_id]
        if not record.is_fenced:
            self.outbox.add(CloseTransfer(record.transfer_id))

    def _fail(self, record: DecodeRecord, reason: str) -> None:
        """Local: this rank votes against the record."""
        if not record.fault:
            record.fault = reason
            logger.info("room=%d attempt=%d decode fails: %s", *record.key, reason)

    def _expired(self, record: DecodeRecord, now: float) -> str:
        """Why the time of a record is over, or "" while it is not."""
        if record.phase not in (DecodePhase.WAITING, DecodePhase.ADMITTED):
            return ""
        if now >= record.deadline:
            is_known = self.routes(record.prefill, record.key.room) is not None
            waits_for = "blocks or KV" if is_known else f"a route to {record.prefill.instance_id}"
            return f"its time is over; it waited for {waits_for}"
        if record.phase is DecodePhase.WAITING:
            return ""
        if now >= record.give_up_at:
            return f"the transfer took longer than {self.timers.transfer_timeout_s} s"
        if record.has_all(TransferState.FINISHED) or self._landed(record) is not None:
            return ""  # only the next tick of the group is awaited, which a long step may delay
        return record.fault or record.lease_fault(now, self.timers.lease_s)

    # -- small parts ---------------------------------------------------------------------------

    def _on_status(self, record: DecodeRecord, link: DecodeLink, message: Status) -> None:
        if record.phase is not DecodePhase.ADMITTED or link.is_final:
            self._drop("final", message)
            return
        link.renewed_at = self.clock()
        if link.status is None or message.state is not TransferState.READY:
            link.status = message  # a READY that comes later was overtaken
        if message.state is TransferState.FAILED:
            self._fail(record, f"prefill rank {message.prefill_rank} failed")

    def _answer(self, key: TransferKey, code: Code, reason: str = "") -> None:
        self.outbox.add(End(key, code, reason))

    def _drop(self, cause: str, message: Message) -> None:
        self.num_dropped[cause] += 1
        logger.debug("room=%d drops %s: %s", message.room, type(message).__name__, cause)


def _any_status(record: DecodeRecord) -> Status:
    """Of the equal ones of a record whose links have ended."""
    statuses = [link.status for link in record.links if link.status is not None]
    assert statuses, "a record that ended has a Status of every link"
    return statuses[0]
