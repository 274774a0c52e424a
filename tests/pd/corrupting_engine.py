"""A transfer engine on whose way bytes change, for tests: named by `disagg.transfer._target_`."""

from pathlib import Path
from typing import Any

import numpy as np

from inferkit.core.protocols import WriteState
from inferkit.kv_transfer.engines.base import Write
from inferkit.kv_transfer.engines.shared_memory import SharedMemoryEngine

NUM_COLUMNS_OF_BLOCKS = 8
"""Rows of KV blocks have so many; that of a slot has fewer."""


class CorruptingEngine(SharedMemoryEngine):
    """While the file `trigger` exists, one bit of each batch of blocks arrives wrong.

    The bit is flipped in the source and put back before the end of the write is told, so the
    writer's memory is right again when a digest is made of it.
    """

    name = "corrupting"

    def __init__(self, *, trigger: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.trigger = Path(trigger)
        self._flipped: dict[int, tuple[int, int]] = {}
        """Handle -> (region, offset)."""

    def write_batch(self, peer: Any, transfer_id: int, runs: Any) -> Write:
        rows = np.asarray(runs)
        place = None
        if rows.shape[1] == NUM_COLUMNS_OF_BLOCKS and self.trigger.exists():
            place = int(rows[0, 0]), int(rows[0, 1])
            self._flip(place)
        write: Write = super().write_batch(peer, transfer_id, runs)
        if place is not None:
            self._flipped[id(write)] = place
        return write

    def poll(self, handle: Any) -> WriteState:
        state: WriteState = super().poll(handle)
        if state is not WriteState.RUNNING:
            place = self._flipped.pop(id(handle), None)
            if place is not None:
                self._flip(place)
        return state

    def _flip(self, place: tuple[int, int]) -> None:
        region, offset = place
        # The sign of a float32, in the last of its bytes.
        self.regions[region][offset + 3] ^= 0x80
