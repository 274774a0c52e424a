"""What travels once on the socket between a writer and a receiver of shared memory.

    writer                          receiver
    hello                      ->
                               <-   welcome, with descriptors: table, cells, each memory

Afterwards the socket only shows whether the other side still lives.
"""

import struct
from typing import NamedTuple

MAGIC = b"inferkm1"
HELLO = struct.Struct("<8sQQII")
WELCOME = struct.Struct("<II")
MAX_FDS = 250
"""The system sends at most 253 descriptors in a message."""

OTHER_EPOCH, BAD_HELLO = 1, 2
_REASONS = {
    OTHER_EPOCH: "the receiver has restarted: its epoch is another one",
    BAD_HELLO: "the receiver does not understand this writer: are both of one version?",
}


class Hello(NamedTuple):
    magic: bytes
    epoch: int
    """Of the receiver, as its description said."""
    writer_epoch: int
    writer_rank: int
    num_threads: int


class Welcome(NamedTuple):
    error: int
    """0 = the memory comes with this message."""
    num_memories: int

    @property
    def reason(self) -> str:
        return _REASONS.get(self.error, f"refused with code {self.error}")
