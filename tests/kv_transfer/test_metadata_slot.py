"""The 64 bytes of a slot (reference section 10, item 32, with the transfer id in front)."""

import struct

import pytest

from inferkit.core.errors import KVCacheError
from inferkit.kv_transfer.metadata_slot import SLOT_BYTES, MetadataSlots, SlotPayload

PAYLOAD = SlotPayload(
    transfer_id=0x1122334455667788,
    room=2**63 - 1,
    first_token=128_000,
    kv_len=4096,
    draft_token_ids=(5, 2**32 - 1),
)


def test_layout_is_byte_exact() -> None:
    data = PAYLOAD.pack()
    assert len(data) == SLOT_BYTES == 64
    assert data[:8].hex() == "8877665544332211"  # the commit word, little-endian
    assert data[8:16] == (2**63 - 1).to_bytes(8, "little")
    assert data[16:24] == (128_000).to_bytes(8, "little")
    assert data[24:32] == (4096).to_bytes(8, "little")
    assert data[32:] == struct.pack("<8I", 2, 5, 2**32 - 1, 0, 0, 0, 0, 0)
    assert SlotPayload.unpack(data) == PAYLOAD


def test_a_slot_without_commit_word_reads_as_none() -> None:
    assert SlotPayload.unpack(bytes(64)) is None
    assert SlotPayload.unpack(bytes(8) + PAYLOAD.pack()[8:]) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"draft_token_ids": tuple(range(8))}, "8 draft tokens do not fit.*allowed are 7"),
        ({"room": 2**64}, "does not fit a metadata slot"),
        ({"first_token": -1}, "does not fit a metadata slot"),
        ({"transfer_id": 0}, "transfer_id=0 is no commit word"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, object], message: str) -> None:
    values = {name: getattr(PAYLOAD, name) for name in PAYLOAD.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        SlotPayload(**(values | changed)).pack()


def test_seven_drafts_fit() -> None:
    payload = SlotPayload(1, 1, 1, 1, tuple(range(7)))
    assert SlotPayload.unpack(payload.pack()) == payload


def test_a_slot_with_too_many_drafts_was_overwritten() -> None:
    with pytest.raises(ValueError, match="names 8 draft tokens"):
        SlotPayload.unpack(struct.pack("<4Q8I", 1, 0, 0, 0, 8, *[0] * 7))


def test_slots_are_zeroed_when_they_are_taken() -> None:
    memory = bytearray(b"\xff" * 128)
    slots = MetadataSlots(memory=memoryview(memory), num_slots=2)
    assert slots.take() == 0
    assert slots.read(0) is None
    memory[:64] = PAYLOAD.pack()
    assert slots.read(0) == PAYLOAD
    slots.give_back(0)
    assert [slots.take(), slots.take(), slots.take()] == [1, 0, None]
    assert slots.read(0) is None
    assert slots.num_free == 0


def test_a_slot_is_given_back_once() -> None:
    slots = MetadataSlots(memory=memoryview(bytearray(128)), num_slots=2)
    for slot in (0, 2, -1):
        with pytest.raises(KVCacheError, match=f"slot {slot} is given back but was not held"):
            slots.give_back(slot)


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="3 metadata slots need 192 bytes, the memory has 128"):
        MetadataSlots(memory=memoryview(bytearray(128)), num_slots=3)
