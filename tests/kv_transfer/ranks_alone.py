"""One prefill rank and one decode rank without a deployment around them."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from inferkit.core.protocols import WriteState
from inferkit.core.transfer_messages import (
    DrainAck,
    Handshake,
    LeaseRenew,
    Status,
    TargetMemory,
    TransferAbort,
    TransferState,
)
from inferkit.kv_transfer.actions import Action, FirstToken, PostBlocks, PostSlot, Send
from inferkit.kv_transfer.decode_records import DecodeRecords
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey, make_attempt
from inferkit.kv_transfer.metadata_slot import MetadataSlots, SlotPayload
from inferkit.kv_transfer.prefill_records import PrefillRecords
from inferkit.kv_transfer.rank_mapping import LinkTarget
from inferkit.kv_transfer.timers import TransferTimers

P, D = Peer("p", 11), Peer("d", 22)
PAIR = PinnedPair(P, D)
KEY = TransferKey(room=5, attempt=make_attempt(1, 1))
TIMERS = TransferTimers()
TOKEN = FirstToken(token_id=7, kv_len=10, seed=3)

A = TypeVar("A")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def only(actions: Sequence[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def sent(actions: Sequence[Action], kind: type[A]) -> list[A]:
    messages: list[Any] = [action.message for action in only(actions, Send)]
    return [message for message in messages if isinstance(message, kind)]


def states(actions: Sequence[Action]) -> list[TransferState]:
    return [status.state for status in sent(actions, Status)]


class Prefill:
    """A prefill rank whose group is it alone."""

    def __init__(self, **kwargs: Any) -> None:
        self.clock = Clock()
        self.records = PrefillRecords(me=P, rank=0, clock=self.clock, timers=TIMERS, **kwargs)

    def accept(self, key: TransferKey = KEY, remaining_s: float = 1000.0) -> list[Action]:
        return self.records.accept(key, PAIR, remaining_ms=int(remaining_s * 1000))

    def tick(self) -> list[Action]:
        """One round of consensus."""
        return self.records.decide(self.records.votes())

    def after(self, seconds: float) -> list[Action]:
        self.clock.now_s += seconds
        return self.records.tick()

    def renewed(self, seconds: float, *transfer_ids: int) -> None:
        """Time passes while decode renews its leases."""
        for _ in range(int(seconds // 10)):
            self.after(10.0)
            self.records.on_message(renew(*transfer_ids))

    def sending(self, transfer_id: int = 1, num_chunks: int = 0) -> list[Action]:
        """A request that has computed some chunks of 4 tokens."""
        self.accept()
        self.records.on_message(handshake(transfer_id))
        self.tick()
        self.records.begin(KEY)
        actions = []
        for idx in range(num_chunks):
            actions += self.records.send_chunk(KEY, 4 * (idx + 1))
        return actions

    def done(self, actions: Sequence[Action]) -> list[Action]:
        """The engine places everything that is posted, and what is posted then."""
        result = []
        for action in actions:
            if isinstance(action, PostBlocks | PostSlot):
                more = self.records.on_write_ended(action.write_id, WriteState.DONE)
                result += more + self.done(more)
        return result


def handshake(transfer_id: int = 1, *, key: TransferKey = KEY, **changed: Any) -> Handshake:
    values: dict[str, Any] = {
        "instance_id": D.instance_id,
        "epoch": D.epoch,
        "peer_epoch": P.epoch,
        "room": key.room,
        "attempt": key.attempt,
        "remaining_ms": 1000,
        "decode_rank": 0,
        "reply_address": "tcp://d",
        "transfer_id": transfer_id,
        "floor": 0,
        "required_dst_info_num": 1,
        "memory": TargetMemory(engine={}),
        "block_ids": {"full_attention": (4, 5, 6)},
        "slot": 2,
    }
    return Handshake(**(values | changed))


def renew(*transfer_ids: int, floor: int = 0) -> LeaseRenew:
    return LeaseRenew(
        instance_id=D.instance_id,
        epoch=D.epoch,
        peer_epoch=P.epoch,
        decode_rank=0,
        reply_address="tcp://d",
        transfer_ids=transfer_ids,
        floor=floor,
    )


def abort(transfer_id: int = 1, *, key: TransferKey = KEY, **changed: Any) -> TransferAbort:
    values: dict[str, Any] = {
        "instance_id": D.instance_id,
        "epoch": D.epoch,
        "peer_epoch": P.epoch,
        "room": key.room,
        "attempt": key.attempt,
        "decode_rank": 0,
        "reply_address": "tcp://d",
        "transfer_id": transfer_id,
    }
    return TransferAbort(**(values | changed))


class Decode:
    """A decode rank whose group is it alone."""

    def __init__(self, targets: Sequence[LinkTarget] = (LinkTarget(0, 1),), **kwargs: Any) -> None:
        self.clock = Clock()
        self.targets: Sequence[LinkTarget] | None = targets
        self.memory = bytearray(64 * 4)
        self.records = DecodeRecords(
            me=D,
            rank=0,
            reply_address="tcp://d",
            memory=TargetMemory(engine={}),
            slots=MetadataSlots(memory=memoryview(self.memory), num_slots=4),
            routes=lambda peer, room: self.targets,
            clock=self.clock,
            timers=TIMERS,
            **kwargs,
        )

    def accept(self, key: TransferKey = KEY, remaining_s: float = 1000.0) -> list[Action]:
        return self.records.accept(
            key, PAIR, kv_len=TOKEN.kv_len, seed=TOKEN.seed, remaining_ms=int(remaining_s * 1000)
        )

    def tick(self) -> list[Action]:
        """One round of consensus."""
        return self.records.decide(self.records.votes())

    def after(self, seconds: float) -> list[Action]:
        self.clock.now_s += seconds
        return self.records.tick()

    def admitted(self, key: TransferKey = KEY, **kwargs: Any) -> list[Action]:
        self.accept(key, **kwargs)
        self.tick()
        return self.records.admit(key, {"full_attention": (4, 5, 6)})

    def write_slot(self, slot: int = 0, **changed: Any) -> None:
        values: dict[str, Any] = {
            "transfer_id": 1,
            "room": KEY.room,
            "first_token": TOKEN.token_id,
            "kv_len": TOKEN.kv_len,
        }
        self.memory[64 * slot : 64 * slot + 64] = SlotPayload(**(values | changed)).pack()

    def landed(self, key: TransferKey = KEY) -> list[Action]:
        self.admitted(key)
        self.write_slot(room=key.room)
        self.records.on_message(status(TransferState.OK, key=key))
        return self.tick()


def status(
    state: TransferState, *, rank: int = 0, key: TransferKey = KEY, **changed: Any
) -> Status:
    ended = state in (TransferState.OK, TransferState.FINISHED)
    values: dict[str, Any] = {
        "instance_id": P.instance_id,
        "epoch": P.epoch,
        "peer_epoch": D.epoch,
        "room": key.room,
        "attempt": key.attempt,
        "transfer_id": 1,
        "prefill_rank": rank,
        "state": state,
        "first_token": TOKEN.token_id if ended else 0,
        "seed": TOKEN.seed if ended else 0,
    }
    return Status(**(values | changed))


def drain_ack(*, rank: int = 0, **changed: Any) -> DrainAck:
    like = status(TransferState.OK)
    message = DrainAck(
        instance_id=like.instance_id,
        epoch=like.epoch,
        peer_epoch=like.peer_epoch,
        room=like.room,
        attempt=like.attempt,
        transfer_id=like.transfer_id,
        prefill_rank=rank,
    )
    return msgspec.structs.replace(message, **changed)
