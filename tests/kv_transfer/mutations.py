"""The hand-off with one rule switched off each: what a schedule must notice.

A mutant is a record table with one method that forgets its rule, or a world whose engine, router
or consensus forgets one. Rules that cover for each other are switched off together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import msgspec

from inferkit.core.protocols import WriteState
from inferkit.core.transfer_messages import Handshake, Status, TransferState
from inferkit.kv_transfer.actions import Action, Code
from inferkit.kv_transfer.decode_book import DecodeBook
from inferkit.kv_transfer.decode_record import DecodeLink, DecodePhase, DecodeRecord
from inferkit.kv_transfer.decode_records import DecodeRecords
from inferkit.kv_transfer.identity import Peer, TransferKey
from inferkit.kv_transfer.metadata_slot import MetadataSlots, SlotPayload
from inferkit.kv_transfer.prefill_links import PrefillLinks
from inferkit.kv_transfer.prefill_record import PrefillLink, PrefillPhase, PrefillRecord, Step
from inferkit.kv_transfer.prefill_records import PrefillRecords
from inferkit.kv_transfer.status import KVStatus, Vote
from inferkit.online.facts import Side
from inferkit.online.router.routed_request import Action as RouterAction
from inferkit.online.router.routed_request import LegFailure, RoutedRequest, RouteState
from inferkit.scheduler.decode_disagg import DecodeDisaggScheduler
from inferkit.scheduler.prefill_disagg import PrefillDisaggScheduler
from tests.kv_transfer.scheduler_mutants import (
    DecodeFreesAtTheEnd,
    DecodeTakesWhatNeverFits,
    PrefillFreesAtTheEnd,
    PrefillTakesWhatNeverFits,
    RetractsTheLast,
    StartsPartsOfPrompts,
    TakesAnyBlock,
    TakesBlocksEarly,
    TakesPartsOfBlocks,
)
from tests.kv_transfer.schedules import SCHEDULES
from tests.kv_transfer.world import World

# -- decode ----------------------------------------------------------------------------------------


class FreesWithoutDrain(DecodeRecords):
    def _vote(self, record: DecodeRecord) -> Vote:
        vote = super()._vote(record)
        is_draining = record.phase is DecodePhase.DRAINING
        return replace(vote, is_settled=True) if is_draining else vote


class FreesByTimeAlone(DecodeRecords):
    def _press_drain(self, record: DecodeRecord, now: float) -> None:
        record.is_fenced |= now >= record.fence_at
        super()._press_drain(record, now)


class TakesNewEpochAsProof(DecodeRecords):
    def _press_drain(self, record: DecodeRecord, now: float) -> None:
        record.is_fenced |= record.prefill in self._gone
        super()._press_drain(record, now)


class TakesOneDrainAck(DecodeRecords):
    def _vote(self, record: DecodeRecord) -> Vote:
        vote = super()._vote(record)
        if record.phase is DecodePhase.DRAINING and any(link.is_drained for link in record.links):
            return replace(vote, is_settled=True)
        return vote


class ReadsAnyEpoch(DecodeRecords):
    def on_message(self, message: Any) -> list[Action]:
        record = self._open.get(message.transfer_id)
        peer = Peer.sender_of(message) if record is None else record.prefill
        return super().on_message(
            msgspec.structs.replace(message, peer_epoch=self.me.epoch, epoch=peer.epoch)
        )


class TakesOneStatus(DecodeRecords):
    def _landed(self, record: DecodeRecord) -> SlotPayload | None:
        ended = [link for link in record.links if link.state is TransferState.OK]
        payload = None if record.slot is None else self.slots.read(record.slot)
        is_own = payload is not None and payload.transfer_id == record.transfer_id
        return payload if ended and is_own else None

    def _land(self, record: DecodeRecord) -> None:
        ended = next(link for link in record.links if link.state is TransferState.OK)
        for link in record.links:
            link.status = ended.status
        super()._land(record)


class TakesStatusByRoom(DecodeRecords):
    def on_message(self, message: Any) -> list[Action]:
        for record in self._open.values():
            is_status = isinstance(message, Status)
            if (
                is_status
                and record.key.room == message.room
                and message.epoch == record.prefill.epoch
            ):
                message = msgspec.structs.replace(
                    message, transfer_id=record.transfer_id, attempt=record.key.attempt
                )
        return super().on_message(message)


class RunsWithoutSlot(DecodeRecords):
    def _landed(self, record: DecodeRecord) -> SlotPayload | None:
        status = record.links[0].status if record.links else None
        if status is None or not record.has_all(TransferState.OK):
            return None
        return SlotPayload(record.transfer_id, record.key.room, status.first_token, record.kv_len)


class TakesAnyCommitWord(DecodeRecords):
    """And believes what a slot says."""

    def _landed(self, record: DecodeRecord) -> SlotPayload | None:
        if not record.has_all(TransferState.OK) or record.slot is None:
            return None
        return self.slots.read(record.slot)


class KeepsSlotContent(MetadataSlots):
    def take(self) -> int | None:
        return self._free.popleft() if self._free else None


class FreesBeforeCopied(DecodeRecords):
    def _vote(self, record: DecodeRecord) -> Vote:
        vote = super()._vote(record)
        is_copying = record.phase is DecodePhase.COPYING
        return replace(vote, is_settled=True) if is_copying else vote


class LeaseOutlivesLanding(DecodeRecords):
    def _vote(self, record: DecodeRecord) -> Vote:
        is_running = record.phase is DecodePhase.RUNNING
        is_over = any(self.clock() > link.renewed_at + 1.0 for link in record.links)
        return Vote(KVStatus.FAILED) if is_running and is_over else super()._vote(record)

    def _decide(self, record: DecodeRecord, vote: Vote) -> None:
        if record.phase is DecodePhase.RUNNING and vote.status is KVStatus.FAILED:
            self._answer(record.key, Code.UNAVAILABLE)
            self._release(record)
        else:
            super()._decide(record, vote)


class WaitsForSlotOfFinished(DecodeRecords):
    def _vote(self, record: DecodeRecord) -> Vote:
        vote = super()._vote(record)
        is_admitted = record.phase is DecodePhase.ADMITTED
        return replace(vote, is_settled=False) if is_admitted else vote


class NoTransferTimer(DecodeRecords):
    def _expired(self, record: DecodeRecord, now: float) -> str:
        return "" if record.phase is DecodePhase.ADMITTED else super()._expired(record, now)


class NoWaitTimer(DecodeRecords):
    def _expired(self, record: DecodeRecord, now: float) -> str:
        return "" if record.phase is DecodePhase.WAITING else super()._expired(record, now)


class NoFenceTimer(DecodeRecords):
    def _press_drain(self, record: DecodeRecord, now: float) -> None:
        record.fence_at = float("inf")
        super()._press_drain(record, now)


class ForgetsBrokenTransfers(DecodeRecords):
    def on_broken(self, transfer_id: int) -> None: ...


class TakesBrokenAsFenced(DecodeRecords):
    def on_broken(self, transfer_id: int) -> None:
        super().on_broken(transfer_id)
        self.on_fenced(transfer_id)


class SendsHandshakeOnce(DecodeRecords):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        send = self.links.send_handshake

        def send_once(record: DecodeRecord, link: DecodeLink, floor: int) -> None:
            if link.renewed_at == self.clock():
                send(record, link, floor)

        self.links.send_handshake = send_once


class DecodeTakesAnyRoom(DecodeRecords):
    def accept(self, key: TransferKey, *args: Any, **kwargs: Any) -> list[Action]:
        """Tells the rooms apart while it looks for rivals."""
        others = self.records
        self.records = {}
        actions = super().accept(key, *args, **kwargs)
        self.records = others | self.records
        return actions


class FloorPassesDraining(DecodeRecords):
    @property
    def floor(self) -> int:
        admitted = [
            transfer_id
            for transfer_id, record in self._open.items()
            if record.phase is DecodePhase.ADMITTED
        ]
        return admitted[0] if admitted else self._next_id


# -- prefill ---------------------------------------------------------------------------------------


class ForgetsUnknownAborts(PrefillRecords):
    def _leave_tombstone(self, book: DecodeBook, message: Any, status: Any, **kwargs: Any) -> None:
        if status is not None:
            super()._leave_tombstone(book, message, status, **kwargs)


class ForgetsLastStatus(PrefillRecords):
    def _answer_from(self, tombstone: Any, message: Any) -> None: ...


class ForgetsTombstonesInTime(PrefillRecords):
    def tick(self) -> list[Action]:
        if self.rank == 0 and int(self.clock()) % 2:
            for book in self.books.all():
                book.tombstones.clear()
        return super().tick()


class ForgetsFloor(PrefillRecords):
    def _raise_floor(self, book: DecodeBook, floor: int) -> None:
        super()._raise_floor(book, floor)
        book.floor = 0


class AcknowledgesAtOnce(PrefillLinks):
    def acknowledge(self, link: PrefillLink) -> None:
        self.send_drain_ack(link.handshake)


class AcknowledgesLostWrites(PrefillLinks):
    def end_write(self, write_id: int, state: WriteState) -> PrefillLink:
        return super().end_write(write_id, WriteState.FAILED)


class PrefillReadsAnyEpoch(PrefillRecords):
    def on_message(self, message: Any) -> list[Action]:
        return super().on_message(msgspec.structs.replace(message, peer_epoch=self.me.epoch))


class JoinsByRoom(PrefillRecords):
    def on_message(self, message: Any) -> list[Action]:
        if isinstance(message, Handshake) and TransferKey.of(message) not in self.records:
            for record in self.records.values():
                if record.key.room == message.room:
                    message = msgspec.structs.replace(message, attempt=record.key.attempt)
        return super().on_message(message)


class FreesUnderWrites(PrefillRecords):
    def _vote(self, record: PrefillRecord) -> Vote:
        vote = super()._vote(record)
        is_aborting = record.phase is PrefillPhase.ABORTING
        return replace(vote, is_settled=True) if is_aborting else vote

    def _bury(self, record: PrefillRecord) -> None:
        for link in record.links.values():
            link.in_flight.clear()
        super()._bury(record)


class GoesOnPosting(PrefillLinks):
    def advance(self, link: PrefillLink) -> None:
        fault, link.record.fault = link.record.fault, ""
        super().advance(link)
        link.record.fault = link.record.fault or fault


class SlotBeforeBlocks(PrefillLinks):
    def _post_chunks(self, link: PrefillLink) -> None:
        first_token = link.record.first_token
        if first_token is None:
            return
        if link.step is Step.BLOCKS:
            self._post_slot(link, first_token)
            self._post_slot(link, first_token)
        super()._post_chunks(link)


class CommitWordFirst(PrefillLinks):
    def _post_slot(self, link: PrefillLink, first_token: Any) -> None:
        if link.step is Step.BLOCKS:
            link.step = Step.SLOT_BODY
            super()._post_slot(link, first_token)
            link.step = Step.BLOCKS
            super()._post_slot(link, first_token)
            link.step = Step.COMMIT_WORD


class FinishesUnderWrites(PrefillLinks):
    def advance(self, link: PrefillLink) -> None:
        record = link.record
        may_end = record.is_finishing and link.step is not Step.DONE and not record.fault
        if may_end and record.phase is PrefillPhase.SENDING:
            self._end(link, TransferState.FINISHED)
        else:
            super().advance(link)


class NoBootstrapTimer(PrefillRecords):
    def _expired(self, record: PrefillRecord, now: float) -> str:
        is_waiting = record.phase is PrefillPhase.BOOTSTRAPPING
        return "" if is_waiting else super()._expired(record, now)


class NoSilenceTimer(PrefillRecords):
    """Nor a deadline, which covers for it later."""

    def _expired(self, record: PrefillRecord, now: float) -> str:
        is_waiting = record.phase is PrefillPhase.BOOTSTRAPPING
        return super()._expired(record, now) if is_waiting else ""


class NoStashTimer(PrefillRecords):
    def tick(self) -> list[Action]:
        stashes = [(book, dict(book.stash)) for book in self.books.all()]
        actions = super().tick()
        for book, stash in stashes:
            book.stash.update(stash)
        return actions


class PrefillTakesAnyRoom(PrefillRecords):
    def accept(self, key: TransferKey, *args: Any, **kwargs: Any) -> list[Action]:
        others = self.records
        self.records = {}
        actions = super().accept(key, *args, **kwargs)
        self.records = others | self.records
        return actions


class OneRankIsReady(PrefillRecords):
    """Computes with the first Handshake, not with all."""

    def _vote(self, record: PrefillRecord) -> Vote:
        vote = super()._vote(record)
        is_waiting = record.phase is PrefillPhase.BOOTSTRAPPING and not record.fault
        if is_waiting and record.links:
            return Vote(KVStatus.WAITING_FOR_INPUT)
        return vote


# -- router ----------------------------------------------------------------------------------------


class RetriesAfterAByte(RoutedRequest):
    def _on_failure(self, side: Side, failure: LegFailure) -> list[RouterAction]:
        if self.state is RouteState.STREAMING:
            self.state, self._is_running, self._early = RouteState.ATTEMPT, False, None
        return super()._on_failure(side, failure)


class HearsOldAttempts(RoutedRequest):
    def _is_heard(self, attempt: int, side: Side) -> bool:
        return self.state is not RouteState.END


# -- the table -------------------------------------------------------------------------------------


def with_links(
    records_class: type[PrefillRecords], links_class: type[PrefillLinks]
) -> type[PrefillRecords]:
    class WithLinks(records_class):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            links = self.links
            self.links = links_class(
                me=links.me,
                rank=links.rank,
                clock=links.clock,
                digest=links.digest,
                outbox=links.outbox,
            )

    return WithLinks


@dataclass(frozen=True)
class Mutation:
    rule: str
    prefill: type[PrefillRecords] = PrefillRecords
    decode: type[DecodeRecords] = DecodeRecords
    links: type[PrefillLinks] = PrefillLinks
    slots: type[MetadataSlots] = MetadataSlots
    routed: type[RoutedRequest] = RoutedRequest
    prefill_scheduler: type[PrefillDisaggScheduler] = PrefillDisaggScheduler
    decode_scheduler: type[DecodeDisaggScheduler] = DecodeDisaggScheduler
    schedule: str = "any fault"
    writes: Mapping[str, bool] = field(default_factory=dict)
    """Changes of `Faults`."""
    rules: Mapping[str, Any] = field(default_factory=dict)
    """Changes of `Plan`."""
    is_quick: bool = False
    """A handful of schedules notice it."""

    def world(self, seed: int) -> World:
        plan = SCHEDULES[self.schedule](Random(seed))
        plan = replace(plan, writes=replace(plan.writes, **self.writes), **self.rules)
        return World(
            plan,
            seed,
            prefill_class=with_links(self.prefill, self.links),
            decode_class=self.decode,
            slots_class=self.slots,
            routed_class=self.routed,
            prefill_scheduler=self.prefill_scheduler,
            decode_scheduler=self.decode_scheduler,
        )


MUTATIONS: Sequence[Mutation] = [
    Mutation(
        "decode keeps aborted blocks until drained or fenced",
        decode=FreesWithoutDrain,
        is_quick=True,
    ),
    Mutation(
        "fence at lease end; time alone frees nothing",
        decode=FreesByTimeAlone,
        is_quick=True,
    ),
    Mutation(
        "fence also after a new prefill epoch is seen",
        decode=TakesNewEpochAsProof,
        is_quick=True,
    ),
    Mutation(
        "DrainAck from every link",
        decode=TakesOneDrainAck,
        schedule="failing links",
        is_quick=True,
    ),
    Mutation(
        "DrainAck only when own writes have ended",
        links=AcknowledgesAtOnce,
        is_quick=True,
    ),
    Mutation(
        "no DrainAck for a lost write",
        links=AcknowledgesLostWrites,
    ),
    Mutation(
        "nothing is posted after an abort",
        links=GoesOnPosting,
        schedule="slow ticks",
    ),
    Mutation(
        "an Abort of an unknown transfer leaves a tombstone",
        prefill=ForgetsUnknownAborts,
        schedule="overtaken handshakes",
    ),
    Mutation(
        "tombstones do not end by time",
        prefill=ForgetsTombstonesInTime,
        schedule="overtaken handshakes",
    ),
    Mutation(
        "ids below the floor are refused for good",
        prefill=ForgetsFloor,
        schedule="overtaken handshakes",
        is_quick=True,
    ),
    Mutation(
        "the floor waits for draining transfers",
        decode=FloorPassesDraining,
    ),
    Mutation(
        "epoch checked in messages, on both sides",
        prefill=PrefillReadsAnyEpoch,
        decode=ReadsAnyEpoch,
        schedule="restarts",
        is_quick=True,
    ),
    Mutation(
        "data plane carries decode's epoch",
        writes=dict(ignores_epoch=True),
        schedule="restarts",
        is_quick=True,
    ),
    Mutation(
        "engine contract: done = placed",
        writes=dict(is_done_when_sent=True),
        is_quick=True,
    ),
    Mutation(
        "Handshake joined by (room, attempt)",
        prefill=JoinsByRoom,
        schedule="two routers",
    ),
    Mutation(
        "attempt never used twice",
        rules=dict(has_unique_attempts=False),
        schedule="room used again",
    ),
    Mutation(
        "prefill holds its source under writes",
        prefill=FreesUnderWrites,
        is_quick=True,
    ),
    Mutation(
        "MIN over the ranks of a group",
        rules=dict(has_min=False),
        is_quick=True,
    ),
    Mutation(
        "Status from every link",
        decode=TakesOneStatus,
    ),
    Mutation(
        "Status only for its own transfer",
        decode=TakesStatusByRoom,
        schedule="late messages",
    ),
    Mutation(
        "all Handshakes before prefill computes",
        prefill=OneRankIsReady,
    ),
    Mutation(
        "slot required (early engine)",
        decode=RunsWithoutSlot,
        schedule="early engine",
        is_quick=True,
    ),
    Mutation(
        "slot after KV (early engine)",
        links=SlotBeforeBlocks,
        schedule="early engine",
        is_quick=True,
    ),
    Mutation(
        "commit word last (early engine)",
        links=CommitWordFirst,
        schedule="early engine",
        is_quick=True,
    ),
    Mutation(
        "commit word = own id, slot zeroed, slot and Status agree (early engine)",
        decode=TakesAnyCommitWord,
        slots=KeepsSlotContent,
        schedule="early engine",
        is_quick=True,
    ),
    Mutation(
        "a Handshake is sent until a Status comes",
        decode=SendsHandshakeOnce,
        schedule="lost once",
        is_quick=True,
    ),
    Mutation(
        "a LeaseRenew is answered after the end",
        prefill=ForgetsLastStatus,
        schedule="lost once",
        is_quick=True,
    ),
    Mutation(
        "first-token finish without slot",
        decode=WaitsForSlotOfFinished,
        is_quick=True,
    ),
    Mutation(
        "Status(finished) when no chunk is in flight",
        links=FinishesUnderWrites,
    ),
    Mutation(
        "a transfer that another's fence broke fails",
        decode=ForgetsBrokenTransfers,
        schedule="peer fences",
    ),
    Mutation(
        "a broken transfer is not drained by that",
        decode=TakesBrokenAsFenced,
        schedule="peer fences",
        is_quick=True,
    ),
    Mutation(
        "copy complete before device blocks are freed",
        decode=FreesBeforeCopied,
        schedule="short of blocks",
        is_quick=True,
    ),
    Mutation(
        "the lease ends at landing",
        decode=LeaseOutlivesLanding,
        is_quick=True,
    ),
    Mutation(
        "timer: transfer and lease",
        decode=NoTransferTimer,
    ),
    Mutation(
        "timer: waiting for route and blocks",
        decode=NoWaitTimer,
    ),
    Mutation(
        "timer: fence",
        decode=NoFenceTimer,
        is_quick=True,
    ),
    Mutation(
        "timer: bootstrap",
        prefill=NoBootstrapTimer,
    ),
    Mutation(
        "timer: decode silent, deadline of prefill",
        prefill=NoSilenceTimer,
    ),
    Mutation(
        "timer: stash",
        prefill=NoStashTimer,
    ),
    Mutation(
        "a room is active once",
        prefill=PrefillTakesAnyRoom,
        decode=DecodeTakesAnyRoom,
        schedule="two routers",
        is_quick=True,
    ),
    Mutation(
        "scheduler: decode blocks are freed by Release only",
        decode_scheduler=DecodeFreesAtTheEnd,
        is_quick=True,
    ),
    Mutation(
        "scheduler: prefill blocks are freed by Release only",
        prefill_scheduler=PrefillFreesAtTheEnd,
        is_quick=True,
    ),
    Mutation(
        "scheduler: prefill takes blocks only when all Handshakes are there",
        prefill_scheduler=TakesBlocksEarly,
        rules=dict(windows=(None,), has_prefix_cache=False),
        schedule="short of blocks",
        is_quick=True,
    ),
    Mutation(
        "scheduler: a prompt begins only if all of it fits",
        prefill_scheduler=StartsPartsOfPrompts,
        schedule="short of blocks",
    ),
    Mutation(
        "scheduler: decode takes the blocks of a whole prompt or none",
        decode_scheduler=TakesPartsOfBlocks,
        rules=dict(windows=(None,)),
        schedule="short of blocks",
        is_quick=True,
    ),
    Mutation(
        "scheduler: what never fits is refused",
        prefill_scheduler=PrefillTakesWhatNeverFits,
        decode_scheduler=DecodeTakesWhatNeverFits,
        is_quick=True,
    ),
    Mutation(
        "scheduler: blocks are taken only if the eldest can still end",
        decode_scheduler=TakesAnyBlock,
        schedule="short of blocks",
        is_quick=True,
    ),
    Mutation(
        "scheduler: the last running request is never retracted",
        decode_scheduler=RetractsTheLast,
        schedule="short of blocks",
        is_quick=True,
    ),
    Mutation(
        "router: no retry after a byte",
        routed=RetriesAfterAByte,
    ),
    Mutation(
        "router: answers of old attempts are ignored",
        routed=HearsOldAttempts,
        schedule="late messages",
    ),
    Mutation("router: both legs are cancelled", rules=dict(cancels_legs=False)),
    Mutation(
        "bootstrap: ranks register again and again",
        rules=dict(registers_again=False),
        is_quick=True,
    ),
]


def first_violation(mutation: Mutation, seeds: range) -> tuple[int, str] | None:
    """(seed, what is reported) of the first schedule that notices the missing rule."""
    for seed in seeds:
        world = mutation.world(seed)
        try:
            world.run()
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}"
    return None
