"""The 64-byte slot that a prefill rank writes into decode's memory after the KV of a request.

    bytes  0..8    u64 transfer_id: the commit word, written last; 0 = nothing is committed
    bytes  8..16   u64 bootstrap room
    bytes 16..24   u64 first token
    bytes 24..32   u64 kv_len, tokens whose KV was sent
    bytes 32..36   u32 number of draft tokens
    bytes 36..64   7 x u32 draft tokens

All numbers are little-endian. Everything else about the first token travels in Status.
"""

import struct
from collections import deque
from dataclasses import dataclass

from inferkit.core.errors import KVCacheError

SLOT_BYTES = 64
COMMIT_BYTES = 8
"""The commit word is [0, 8) of a slot; its body is [8, 64)."""
MAX_DRAFT_TOKENS = 7

_FORMAT = struct.Struct(f"<4QI{MAX_DRAFT_TOKENS}I")
assert _FORMAT.size == SLOT_BYTES


@dataclass(frozen=True, slots=True)
class SlotPayload:
    """What a slot says."""

    transfer_id: int
    room: int
    first_token: int
    kv_len: int
    draft_token_ids: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """The slot's 64 bytes.

        Raises:
            ValueError: too many draft tokens, or a number that its field cannot hold.
        """
        drafts = self.draft_token_ids
        if len(drafts) > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"room={self.room}: {len(drafts)} draft tokens do not fit a metadata slot; "
                f"allowed are {MAX_DRAFT_TOKENS}, so model.next_n is at most {MAX_DRAFT_TOKENS}"
            )
        if self.transfer_id < 1:
            raise ValueError(f"transfer_id={self.transfer_id} is no commit word; allowed is >= 1")
        padding = (0,) * (MAX_DRAFT_TOKENS - len(drafts))
        try:
            return _FORMAT.pack(
                self.transfer_id,
                self.room,
                self.first_token,
                self.kv_len,
                len(drafts),
                *drafts,
                *padding,
            )
        except struct.error as error:
            raise ValueError(f"{self} does not fit a metadata slot: {error}") from error

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> "SlotPayload | None":
        """None while the commit word is 0.

        Raises:
            ValueError: a committed slot names more draft tokens than it has room for.
        """
        transfer_id, room, first_token, kv_len, num_drafts, *drafts = _FORMAT.unpack(data)
        if transfer_id == 0:
            return None
        if num_drafts > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"metadata slot of transfer_id={transfer_id} names {num_drafts} draft tokens; "
                f"allowed are {MAX_DRAFT_TOKENS}: its memory was overwritten"
            )
        return cls(transfer_id, room, first_token, kv_len, tuple(drafts[:num_drafts]))


class MetadataSlots:
    """The slots of one decode rank, over memory that prefill ranks write.

    Taken and given back by the common decision only, so every rank of a group hands out the same
    slot for a request. `memory` is at least `num_slots` * 64 writable bytes.
    """

    def __init__(self, *, memory: memoryview, num_slots: int) -> None:
        if len(memory) < num_slots * SLOT_BYTES:
            raise ValueError(
                f"{num_slots} metadata slots need {num_slots * SLOT_BYTES} bytes, the memory has "
                f"{len(memory)}"
            )
        self.num_slots = num_slots
        self._memory = memory
        self._free = deque(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A zeroed slot, or None when all are held."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)
        return slot

    def give_back(self, slot: int) -> None:
        if slot in self._free or not 0 <= slot < self.num_slots:
            raise KVCacheError(f"metadata slot {slot} is given back but was not held")
        self._free.append(slot)

    def read(self, slot: int) -> SlotPayload | None:
        return SlotPayload.unpack(self._memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES])
