"""What travels on a connection of the tcp engine. All numbers are little-endian.

    writer                                  receiver
    hello (epoch of the receiver)      ->
                                       <-   welcome (status)
    frame header, table, payload       ->
                                       <-   answer (batch_id, status), once the payload is placed
    ...

A table has one row of int64 per run: region, offset, num_bytes, num_pieces, stride. The payload is
the bytes of all pieces in this order. Answers come in the order of the frames of one connection.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np

MAGIC = b"inferkv1"

HELLO = struct.Struct("<8sQQI4x")
WELCOME = struct.Struct("<8sI4x")
HEADER = struct.Struct("<QQQQI4x")
ANSWER = struct.Struct("<QI4x")

ROW = np.dtype("<i8")
ROW_COLUMNS = 5
MAX_FRAME_RUNS = 1 << 14
MAX_FRAME_BYTES = 8 << 20


class Hello(NamedTuple):
    magic: bytes
    epoch: int
    """Of the receiver, as its description said."""
    writer_epoch: int
    writer_rank: int


class Header(NamedTuple):
    epoch: int
    """Of the receiver, again: a stream that is out of step is noticed."""
    transfer_id: int
    batch_id: int
    payload_bytes: int
    num_runs: int


class Status(IntEnum):
    OK = 0
    OTHER_EPOCH = 1
    NOT_OPEN = 2
    OUT_OF_BOUNDS = 3


WHY = {
    Status.OTHER_EPOCH: "the receiver has restarted: its epoch is another one",
    Status.NOT_OPEN: "the transfer is not open at the receiver: it is over, or was fenced",
    Status.OUT_OF_BOUNDS: "the receiver has not registered this memory",
}
