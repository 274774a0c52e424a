"""What a prefill rank does on its links: posts writes in their order, and answers decode ranks.

    KV -> slot body -> commit word -> Status(ok)

Each is posted when everything before it is placed, so a decode rank that sees the commit word has
all KV of the link, and one that has Status(ok) has both.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

from inferkit.core.messages import Message
from inferkit.core.protocols import Clock, WriteState
from inferkit.core.transfer_messages import (
    DrainAck,
    Handshake,
    Status,
    ToPrefill,
    TransferAbort,
    TransferState,
)
from inferkit.kv_transfer.actions import FirstToken, Outbox, PostBlocks, PostSlot, Send
from inferkit.kv_transfer.identity import Peer, TransferKey
from inferkit.kv_transfer.metadata_slot import COMMIT_BYTES, SlotPayload
from inferkit.kv_transfer.prefill_record import PrefillLink, PrefillPhase, PrefillRecord, Step

Digest = Callable[[TransferKey, Handshake], str]
"""Of the bytes that a link has moved; "" = not computed."""

NOTHING = FirstToken(token_id=0, kv_len=0)
FINAL = {TransferState.OK, TransferState.FINISHED, TransferState.FAILED}


class PrefillLinks:
    def __init__(
        self, *, me: Peer, rank: int, clock: Clock, digest: Digest, outbox: Outbox
    ) -> None:
        self.me = me
        self.rank = rank
        self.clock = clock
        self.digest = digest
        self.outbox = outbox
        self.writes: dict[int, PrefillLink] = {}
        """Write id -> link, of every write that the engine has not ended."""
        self._write_ids = count(1)

    # -- writes --------------------------------------------------------------------------------

    def advance(self, link: PrefillLink) -> None:
        """Post what may be posted now; a rank that wants the record to fail posts nothing."""
        record = link.record
        if record.phase is not PrefillPhase.SENDING or record.fault or link.step is Step.DONE:
            return
        if not link.is_dummy and not record.is_finishing:
            self._post_chunks(link)
        if link.in_flight or record.first_token is None:
            return
        if record.is_finishing:
            # Decode frees its blocks on this alone, so it waits for chunks that are in flight.
            self._end(link, TransferState.FINISHED)
        elif link.is_dummy or link.step is Step.COMMIT_WORD:
            self._end(link, TransferState.OK)
        else:
            self._post_slot(link, record.first_token)

    def end_write(self, write_id: int, state: WriteState) -> PrefillLink:
        """Take a write that the engine has ended off its link."""
        link = self.writes.pop(write_id)
        link.in_flight.discard(write_id)
        link.is_lost |= state is WriteState.LOST
        return link

    def _post_chunks(self, link: PrefillLink) -> None:
        record = link.record
        for idx in range(link.num_posted, len(record.chunks)):
            self.outbox.add(
                PostBlocks(
                    self._new_write(link),
                    record.key,
                    link.handshake,
                    first_token=record.chunks[idx - 1] if idx else 0,
                    end_token=record.chunks[idx],
                    is_last=record.first_token is not None and idx == len(record.chunks) - 1,
                )
            )
        link.num_posted = len(record.chunks)

    def _post_slot(self, link: PrefillLink, first_token: FirstToken) -> None:
        """The body first, then the commit word."""
        payload = SlotPayload(
            transfer_id=link.handshake.transfer_id,
            room=link.record.key.room,
            first_token=first_token.token_id,
            kv_len=first_token.kv_len,
            draft_token_ids=first_token.draft_token_ids,
        ).pack()
        if link.step is Step.BLOCKS:
            link.step, start, end = Step.SLOT_BODY, COMMIT_BYTES, len(payload)
        else:
            link.step, start, end = Step.COMMIT_WORD, 0, COMMIT_BYTES
        write_id = self._new_write(link)
        self.outbox.add(
            PostSlot(write_id, link.record.key, link.handshake, start, payload[start:end])
        )

    def _new_write(self, link: PrefillLink) -> int:
        write_id = next(self._write_ids)
        self.writes[write_id] = link
        link.in_flight.add(write_id)
        return write_id

    def _end(self, link: PrefillLink, state: TransferState) -> None:
        link.step = Step.DONE
        self.report(link, state)

    # -- answers -------------------------------------------------------------------------------

    def report(self, link: PrefillLink, state: TransferState | None = None) -> None:
        """Tell decode where a link stands, or that it has ended; the first end is kept."""
        status = link.final_status
        if status is None:
            if state is None:
                is_sending = link.record.phase is PrefillPhase.SENDING
                state = TransferState.SENDING if is_sending else TransferState.READY
            status = self.status(link.handshake, state, link.record)
            if state in FINAL:
                link.final_status = status
        self.send(link.handshake, status)

    def acknowledge(self, link: PrefillLink) -> None:
        """DrainAck, if nothing of the link is in flight; otherwise when its last write ends."""
        if link.is_drained:
            self.send_drain_ack(link.handshake)

    def send_drain_ack(self, message: Handshake | TransferAbort) -> None:
        ack = DrainAck(
            **self._common(message, 0.0),
            transfer_id=message.transfer_id,
            prefill_rank=self.rank,
        )
        self.send(message, ack)

    def status(
        self, handshake: Handshake, state: TransferState, record: PrefillRecord | None = None
    ) -> Status:
        first_token, digest = NOTHING, ""
        if record is not None and state in (TransferState.OK, TransferState.FINISHED):
            first_token = record.first_token or NOTHING
        if state is TransferState.OK:
            digest = self.digest(TransferKey.of(handshake), handshake)
        return Status(
            **self._common(handshake, 0.0 if record is None else record.deadline),
            transfer_id=handshake.transfer_id,
            prefill_rank=self.rank,
            state=state,
            first_token=first_token.token_id,
            logprobs=first_token.logprobs,
            seed=first_token.seed,
            digest=digest,
        )

    def send(self, to: ToPrefill, message: Status | DrainAck) -> None:
        """Answer the decode rank that `to` came from."""
        self.outbox.add(Send(Peer.sender_of(to), to.decode_rank, message, to.reply_address))

    def _common(self, message: Message, deadline: float) -> dict[str, Any]:
        return {
            "instance_id": self.me.instance_id,
            "epoch": self.me.epoch,
            "peer_epoch": message.epoch,
            "room": message.room,
            "attempt": message.attempt,
            "remaining_ms": int(max(0.0, deadline - self.clock()) * 1000),
        }
