"""The hand-off as one prefill rank sees it: a state machine per (room, attempt), a link per decode
rank that it feeds. Protocol section 3; who may free what is in README.md.

    BOOTSTRAPPING --all Handshakes--> READY --blocks taken--> SENDING --all links done--> over
          |                             |                        |
          '------- over <---------------'                    ABORTING --no write in flight--> over

Phases are common to all ranks of a group: they change by `decide`, and by `accept`, `refuse`,
`begin`, `send_chunk`, `complete`, `finish` and `cancel`, which every rank calls in the same order
with the same arguments. Messages, ends of writes and timers reach one rank; they change its links
and its vote, and a rank that must not go on stops posting at once, before the others know.

Opens nothing and starts nothing. Not thread-safe: the owner serialises all calls, and carries out
the actions of each before the next.
"""

import logging
from collections import Counter
from collections.abc import Sequence

from inferkit.core.errors import RequestError
from inferkit.core.messages import Message
from inferkit.core.protocols import Clock, WriteState
from inferkit.core.transfer_messages import (
    Handshake,
    LeaseRenew,
    Status,
    ToPrefillRank,
    TransferAbort,
    TransferState,
)
from inferkit.kv_transfer.actions import (
    Action,
    CancelWrites,
    Code,
    End,
    FirstToken,
    Outbox,
    Ready,
    Release,
)
from inferkit.kv_transfer.decode_book import DecodeBook, DecodeBooks, Stashed, Tombstone
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey, is_rival
from inferkit.kv_transfer.prefill_links import Digest, PrefillLinks
from inferkit.kv_transfer.prefill_record import (
    ACTIVE,
    PrefillLink,
    PrefillPhase,
    PrefillRecord,
    Step,
)
from inferkit.kv_transfer.status import KVStatus, Vote, decode_votes, encode_votes
from inferkit.kv_transfer.timers import TransferTimers

logger = logging.getLogger(__name__)


class PrefillRecords:
    """All hand-offs of one prefill rank.

    Args:
        me: this instance, in this life.
        rank: of this process in its instance; the "P rank" of the messages.
    """

    def __init__(
        self,
        *,
        me: Peer,
        rank: int,
        clock: Clock,
        timers: TransferTimers,
        digest: Digest = lambda key, handshake: "",
    ) -> None:
        self.me = me
        self.rank = rank
        self.clock = clock
        self.timers = timers
        self.records: dict[TransferKey, PrefillRecord] = {}
        """In order of acceptance, which is the order of votes."""
        self.books = DecodeBooks()
        self.num_dropped: Counter[str] = Counter()
        """Messages that had no effect, by cause."""
        self.outbox = Outbox()
        self.links = PrefillLinks(me=me, rank=rank, clock=clock, digest=digest, outbox=self.outbox)
        self._ended: dict[TransferKey, float] = {}
        """Records that were over before every Handshake came, and until when those that still
        come are answered; a convenience with an end, no safety depends on it."""

    # -- common events: every rank, same order, same arguments ---------------------------------

    def accept(self, key: TransferKey, pair: PinnedPair, *, remaining_ms: int) -> list[Action]:
        """A Generate has come. It may be answered at once with End; then there is no record.

        Raises:
            RequestError: this attempt is here already; attempts are never used twice.
        """
        if key in self.records:
            raise RequestError(f"room={key.room} attempt={key.attempt} was used before")
        rivals = (key for key, record in self.records.items() if record.phase in ACTIVE)
        if pair.prefill != self.me:
            self._answer(key, Code.UNAVAILABLE, f"the request is for epoch {pair.prefill.epoch}")
        elif any(is_rival(key, other) for other in rivals):
            self._answer(key, Code.CONFLICT, f"room {key.room} is active for another request")
        else:
            self._add_record(key, pair.decode, remaining_ms / 1000)
        return self.outbox.take()

    def refuse(self, key: TransferKey, decode: Peer, reason: str) -> list[Action]:
        """Answer a Generate that can never run here with 400; it gets no record."""
        self._answer(key, Code.REFUSED, reason)
        self._remember_end(key, decode)
        return self.outbox.take()

    def begin(self, key: TransferKey) -> None:
        """The request of a ready record has taken its blocks and is computed from now on."""
        record = self.records[key]
        assert record.phase is PrefillPhase.READY, f"begin() of a record that is {record.phase}"
        record.phase = PrefillPhase.SENDING

    def is_sending(self, key: TransferKey) -> bool:
        """Whether computing the request is still of use. Equal on all ranks between two ticks."""
        record = self.records.get(key)
        return record is not None and record.phase is PrefillPhase.SENDING

    def send_chunk(self, key: TransferKey, end_token: int) -> list[Action]:
        """KV of tokens [.., end_token) is computed; its full blocks may travel."""
        if self.is_sending(key):
            record = self.records[key]
            record.chunks.append(end_token)
            self._advance(record)
        return self.outbox.take()

    def complete(self, key: TransferKey, first_token: FirstToken) -> list[Action]:
        """The whole prompt is computed: send what is left, then the slot."""
        if self.is_sending(key):
            record = self.records[key]
            record.chunks.append(first_token.kv_len)
            record.first_token = first_token
            self._advance(record)
        return self.outbox.take()

    def finish(self, key: TransferKey, first_token: FirstToken) -> list[Action]:
        """The first token ends the request: nothing more is sent, and no slot is written."""
        if self.is_sending(key):
            record = self.records[key]
            record.first_token, record.is_finishing = first_token, True
            self._advance(record)
        return self.outbox.take()

    def cancel(self, key: TransferKey) -> list[Action]:
        """Nobody waits for the request any more; unknown and aborting ones stay as they are."""
        record = self.records.get(key)
        if record is not None and record.phase in ACTIVE:
            self._abort(record, Code.CANCELLED, "cancelled")
        return self.outbox.take()

    def votes(self) -> list[int]:
        """This rank's part of the MIN all-reduce.

        `is_settled` of a vote: in ABORTING, no write of this rank is in flight.
        """
        return encode_votes(self.records, [self._vote(rec) for rec in self.records.values()])

    def decide(self, minimum: Sequence[int]) -> list[Action]:
        """Act on the minimum of all ranks' votes, which were given since the last common event."""
        votes = decode_votes(minimum)
        for record, vote in zip(list(self.records.values()), votes, strict=True):
            self._decide(record, vote)
        return self.outbox.take()

    # -- local events --------------------------------------------------------------------------

    def on_message(self, message: ToPrefillRank) -> list[Action]:
        if message.peer_epoch != self.me.epoch:
            # Also what is meant for a former life of this process: it must not be acknowledged.
            self._drop("peer_epoch", message)
            return []
        book = self.books.of(Peer.sender_of(message), message.decode_rank)
        if book is None:
            self._drop("retired", message)
        elif isinstance(message, Handshake):
            self._on_handshake(message, book)
        elif isinstance(message, LeaseRenew):
            self._on_lease_renew(message, book)
        else:
            self._on_abort(message, book)
        return self.outbox.take()

    def on_write_ended(self, write_id: int, state: WriteState, error: str = "") -> list[Action]:
        """The engine has ended a write, or refused to post it: done, failed or lost."""
        assert state is not WriteState.RUNNING, "a running write has not ended"
        link = self.links.end_write(write_id, state)
        if state is WriteState.DONE:
            self.links.advance(link)
        else:
            self._fail(
                link.record, f"a write to rank {link.handshake.decode_rank} {state}: {error}"
            )
        if link.wants_drain_ack:
            self.links.acknowledge(link)
        return self.outbox.take()

    def tick(self) -> list[Action]:
        """Look at the timers; called about every 100 ms, independent of scheduling."""
        now = self.clock()
        for record in self.records.values():
            fault = "" if record.fault else self._expired(record, now)
            if fault:
                self._fail(record, fault)
        for book in self.books.all():
            for stashed in book.expire_stash(now):
                self._drop("stash_timeout", stashed)
        for key in [key for key, until in self._ended.items() if now >= until]:
            del self._ended[key]
        return self.outbox.take()

    # -- decisions -----------------------------------------------------------------------------

    def _vote(self, record: PrefillRecord) -> Vote:
        match record.phase:
            case PrefillPhase.ABORTING:
                return Vote(KVStatus.FAILED, is_settled=record.num_in_flight == 0)
            case _ if record.fault:
                return Vote(KVStatus.FAILED)
            case PrefillPhase.BOOTSTRAPPING if not record.has_all_handshakes:
                return Vote(KVStatus.BOOTSTRAPPING)
            case PrefillPhase.BOOTSTRAPPING | PrefillPhase.READY:
                return Vote(KVStatus.WAITING_FOR_INPUT)
        is_done = all(link.step is Step.DONE for link in record.links.values())
        return Vote(KVStatus.SUCCESS if is_done else KVStatus.TRANSFERRING)

    def _decide(self, record: PrefillRecord, vote: Vote) -> None:
        if record.phase is PrefillPhase.ABORTING:
            if vote.is_settled:
                self.outbox.add(Release(record.key, blocks=True))
                self._bury(record)
        elif vote.status is KVStatus.FAILED:
            self._abort(record, Code.UNAVAILABLE, record.fault or "it failed on another rank")
        elif record.phase is PrefillPhase.BOOTSTRAPPING:
            if vote.status is KVStatus.WAITING_FOR_INPUT:
                record.phase = PrefillPhase.READY
                self.outbox.add(Ready(record.key))
        elif vote.status is KVStatus.SUCCESS:
            # Every own write is placed on every rank, so the source is not read any more.
            self._answer(record.key, Code.OK)
            self.outbox.add(Release(record.key, blocks=True))
            self._bury(record)

    def _abort(self, record: PrefillRecord, code: Code, reason: str) -> None:
        """Common: no rank posts any more; blocks wait until no rank has a write in flight."""
        self._fail(record, reason)
        self._answer(record.key, code, reason)
        if record.phase is PrefillPhase.SENDING:
            record.phase = PrefillPhase.ABORTING
        else:
            self._bury(record)

    def _fail(self, record: PrefillRecord, reason: str) -> None:
        """Local: this rank posts nothing more for the record and votes against it."""
        if record.fault:
            return
        record.fault = reason
        logger.info("room=%d attempt=%d prefill fails: %s", *record.key, reason)
        for link in record.links.values():
            if link.step is not Step.DONE:
                self.links.report(link, TransferState.FAILED)
        writes = tuple(write_id for link in record.links.values() for write_id in link.in_flight)
        if writes:
            self.outbox.add(CancelWrites(writes))

    def _bury(self, record: PrefillRecord) -> None:
        """The record is over: each link leaves a tombstone."""
        assert record.num_in_flight == 0, "a record with writes in flight is not over"
        for link in record.links.values():
            book = self.books.of(record.decode, link.handshake.decode_rank)
            assert book is not None, "a life with live links is not retired"
            self._leave_tombstone(book, link.handshake, link.final_status, is_lost=link.is_lost)
        del self.records[record.key]
        if not record.has_all_handshakes:
            self._remember_end(record.key, record.decode)

    def _expired(self, record: PrefillRecord, now: float) -> str:
        """Why the time of a record is over, or "" while it is not."""
        if record.phase is PrefillPhase.BOOTSTRAPPING and now >= record.bootstrap_until:
            return (
                f"room={record.key.room}: {len(record.links)} of "
                f"{record.required_dst_info_num or 'its'} Handshakes of decode "
                f"{record.decode.instance_id} came in time; is it up, and has it room?"
            )
        if now >= record.deadline:
            return "its time is over"
        for rank, link in record.links.items():
            is_silent = now >= link.renewed_at + self.timers.silence_s
            if is_silent and link.step is not Step.DONE:
                return f"decode rank {rank} was silent for {self.timers.silence_s} s"
        return ""

    # -- messages of decode --------------------------------------------------------------------

    def _on_handshake(self, message: Handshake, book: DecodeBook) -> None:
        self._raise_floor(book, message.floor)
        transfer_id, key = message.transfer_id, TransferKey.of(message)
        tombstone, link = book.tombstones.get(transfer_id), book.live.get(transfer_id)
        if transfer_id < book.floor:
            self._drop("below_floor", message)
        elif tombstone is not None:
            self._drop("tombstone", message)
            self._answer_from(tombstone, message)
        elif link is not None:
            link.renewed_at = self.clock()
            self.links.report(link)
        elif key in self.records:
            self._bind(self.records[key], message, book)
        elif key in self._ended:
            self._drop("over", message)
            status = self.links.status(message, TransferState.FAILED)
            self._leave_tombstone(book, message, status)
            self.links.send(message, status)
        else:
            # Answered although nobody owns it: a Generate may be late by a long step of the model.
            until = self.clock() + self.timers.stash_s
            book.stash.setdefault(transfer_id, Stashed(message, until))
            self.links.send(message, self.links.status(message, TransferState.READY))

    def _bind(self, record: PrefillRecord, message: Handshake, book: DecodeBook) -> None:
        rank, required = message.decode_rank, record.required_dst_info_num
        is_late = record.phase is not PrefillPhase.BOOTSTRAPPING or record.has_all_handshakes
        if Peer.sender_of(message) != record.decode:
            self._drop("not_pinned", message)
        elif is_late or rank in record.links:
            self._drop("bound", message)
        elif required not in (None, message.required_dst_info_num):
            self._drop("inconsistent", message)
            self._fail(
                record,
                f"decode rank {rank} says required_dst_info_num={message.required_dst_info_num}, "
                f"another one {required}",
            )
        else:
            link = PrefillLink(record, message, renewed_at=self.clock())
            record.links[rank] = book.live[message.transfer_id] = link
            self.links.report(link, TransferState.FAILED if record.fault else None)

    def _on_lease_renew(self, message: LeaseRenew, book: DecodeBook) -> None:
        self._raise_floor(book, message.floor)
        for transfer_id in message.transfer_ids:
            if transfer_id in book.live:
                link = book.live[transfer_id]
                link.renewed_at = self.clock()
                self.links.report(link)
            elif transfer_id in book.tombstones:
                self._answer_from(book.tombstones[transfer_id], message)
            elif transfer_id in book.stash:
                handshake = book.stash[transfer_id].handshake
                self.links.send(message, self.links.status(handshake, TransferState.READY))

    def _on_abort(self, message: TransferAbort, book: DecodeBook) -> None:
        transfer_id, key = message.transfer_id, TransferKey.of(message)
        link = book.live.get(transfer_id)
        if link is not None:
            link.wants_drain_ack = True
            self._fail(link.record, "decode aborted it")
            self.links.acknowledge(link)
            return
        tombstone = book.tombstones.get(transfer_id)
        if tombstone is None and transfer_id >= book.floor:
            # It may have overtaken its Handshake, which must find a tombstone when it comes.
            self._leave_tombstone(book, message, None)
            record = self.records.get(key)
            if record is not None and record.decode == Peer.sender_of(message):
                self._fail(record, "decode aborted it")
        if tombstone is None or not tombstone.is_lost:
            self.links.send_drain_ack(message)

    def _raise_floor(self, book: DecodeBook, floor: int) -> None:
        for link in book.raise_floor(floor):
            if link.step is not Step.DONE:
                self._fail(link.record, "it is over at decode")

    def _answer_from(self, tombstone: Tombstone, message: Handshake | LeaseRenew) -> None:
        if tombstone.last_status is not None:
            self.links.send(message, tombstone.last_status)

    # -- small parts ---------------------------------------------------------------------------

    def _add_record(self, key: TransferKey, decode: Peer, remaining_s: float) -> None:
        now = self.clock()
        bootstrap_s = min(self.timers.handshake_timeout_s, remaining_s)
        record = PrefillRecord(key, decode, now + remaining_s, now + bootstrap_s)
        self.records[key] = record
        for book in self.books.of_peer(decode).values():
            if book.has_tombstone_of(key):
                self._fail(record, "decode aborted it before it came")
            for handshake in book.take_stash_of(key):
                self._bind(record, handshake, book)

    def _advance(self, record: PrefillRecord) -> None:
        for link in record.links.values():
            self.links.advance(link)

    def _leave_tombstone(
        self,
        book: DecodeBook,
        message: Handshake | TransferAbort,
        status: Status | None,
        *,
        is_lost: bool = False,
    ) -> None:
        tombstone = Tombstone(TransferKey.of(message), status, is_lost)
        book.bury(message.transfer_id, tombstone)

    def _remember_end(self, key: TransferKey, decode: Peer) -> None:
        self._ended[key] = self.clock() + self.timers.stash_s
        for book in self.books.of_peer(decode).values():
            for handshake in book.take_stash_of(key):
                self._on_handshake(handshake, book)

    def _answer(self, key: TransferKey, code: Code, reason: str = "") -> None:
        self.outbox.add(End(key, code, reason))

    def _drop(self, cause: str, message: Message) -> None:
        self.num_dropped[cause] += 1
        logger.debug("room=%d drops %s: %s", message.room, type(message).__name__, cause)
