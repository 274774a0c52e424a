"""Whether a transfer has landed on a decode rank: the slot and the Status of every link agree."""

from collections.abc import Callable

from inferkit.core.transfer_messages import Status, TransferState
from inferkit.kv_transfer.decode_record import DecodeRecord
from inferkit.kv_transfer.metadata_slot import MetadataSlots, SlotPayload

ContentFault = Callable[[DecodeRecord, Status], str]
"""Compares what one link has written with the digest in its Status; "" = equal."""


class LandingError(ValueError):
    """What has landed is not what this request waits for."""


class Landing:
    def __init__(self, *, slots: MetadataSlots, content_fault: ContentFault) -> None:
        self.slots = slots
        self.content_fault = content_fault

    def payload(self, record: DecodeRecord) -> SlotPayload | None:
        """What the slot says, once every link is ok and the commit word is the transfer's own.

        Both are needed, in either order: the slot proves one prefill rank only, and Status is
        needed from all of them.

        Raises:
            LandingError: slot, Status, request or content disagree.
        """
        if not record.has_all(TransferState.OK) or record.slot is None:
            return None
        try:
            payload = self.slots.read(record.slot)
        except ValueError as error:
            raise LandingError(str(error)) from error
        if payload is None or payload.transfer_id != record.transfer_id:
            return None
        if not record.is_verified:
            self._verify(record, payload)
            record.is_verified = True
        return payload

    def _verify(self, record: DecodeRecord, payload: SlotPayload) -> None:
        statuses = [link.status for link in record.links if link.status is not None]
        tokens = {status.first_token for status in statuses} | {payload.first_token}
        seeds = {status.seed for status in statuses} | {record.seed}
        if len(tokens) != 1:
            raise LandingError(f"slot and prefill ranks name different first tokens: {tokens}")
        if len(seeds) != 1:
            raise LandingError(f"request and prefill ranks name different seeds: {seeds}")
        if (payload.room, payload.kv_len) != (record.key.room, record.kv_len):
            raise LandingError(
                f"the slot is of room {payload.room} with {payload.kv_len} tokens, expected are "
                f"room {record.key.room} with {record.kv_len}"
            )
        for status in statuses:
            fault = self.content_fault(record, status)
            if fault:
                raise LandingError(fault)
