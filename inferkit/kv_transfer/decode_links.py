"""What a decode rank tells prefill ranks: Handshakes, renewals of its leases, aborts."""

from collections.abc import Iterable
from typing import Any

from inferkit.core.protocols import Clock
from inferkit.core.transfer_messages import (
    Handshake,
    LeaseRenew,
    TargetMemory,
    ToPrefillRank,
    TransferAbort,
)
from inferkit.kv_transfer.actions import Outbox, Send
from inferkit.kv_transfer.decode_record import DecodeLink, DecodeRecord
from inferkit.kv_transfer.identity import Peer


class DecodeLinks:
    def __init__(
        self,
        *,
        me: Peer,
        rank: int,
        reply_address: str,
        memory: TargetMemory,
        clock: Clock,
        outbox: Outbox,
    ) -> None:
        self.me = me
        self.rank = rank
        self.reply_address = reply_address
        self.memory = memory
        self.clock = clock
        self.outbox = outbox
        self._last_sent: dict[tuple[Peer, int], int] = {}
        """Prefill rank -> newest transfer id that it may remember."""

    def send_handshake(self, record: DecodeRecord, link: DecodeLink, floor: int) -> None:
        message = Handshake(
            **self._of(record),
            transfer_id=record.transfer_id,
            floor=floor,
            required_dst_info_num=link.target.required_dst_info_num,
            memory=self.memory,
            block_ids={} if link.is_dummy else dict(record.block_ids),
            slot=record.slot or 0,
        )
        pair = (record.prefill, link.target.prefill_rank)
        self._last_sent[pair] = max(record.transfer_id, self._last_sent.get(pair, 0))
        self._send(*pair, message)

    def send_abort(self, record: DecodeRecord, link: DecodeLink) -> None:
        message = TransferAbort(**self._of(record), transfer_id=record.transfer_id)
        self._send(record.prefill, link.target.prefill_rank, message)

    def renew(self, admitted: Iterable[DecodeRecord], floor: int) -> None:
        """One LeaseRenew per prefill rank, and Handshakes again that nobody has answered."""
        live: dict[tuple[Peer, int], list[int]] = {}
        for record in admitted:
            for link in record.all_links.values():
                pair = (record.prefill, link.target.prefill_rank)
                live.setdefault(pair, []).append(record.transfer_id)
                if link.status is None:
                    self.send_handshake(record, link, floor)
        # A rank of which every transfer is over is told so once more, for it to forget them.
        for pair, newest in list(self._last_sent.items()):
            if newest < floor:
                del self._last_sent[pair]
                live[pair] = []
        for (peer, rank), transfer_ids in live.items():
            message = LeaseRenew(
                **self._from_me(peer), transfer_ids=tuple(transfer_ids), floor=floor
            )
            self._send(peer, rank, message)

    def _of(self, record: DecodeRecord) -> dict[str, Any]:
        left_s = max(0.0, record.deadline - self.clock())
        return self._from_me(record.prefill) | {
            "room": record.key.room,
            "attempt": record.key.attempt,
            "remaining_ms": int(left_s * 1000),
        }

    def _from_me(self, peer: Peer) -> dict[str, Any]:
        return {
            "instance_id": self.me.instance_id,
            "epoch": self.me.epoch,
            "peer_epoch": peer.epoch,
            "decode_rank": self.rank,
            "reply_address": self.reply_address,
        }

    def _send(self, peer: Peer, rank: int, message: ToPrefillRank) -> None:
        self.outbox.add(Send(peer, rank, message))
