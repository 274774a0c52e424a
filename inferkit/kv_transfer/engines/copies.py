"""Many small runs at once: into one buffer, or out of one. Knows no peer.

Copying them one by one costs half a microsecond of Python each, with the interpreter's lock taken.
A strided row is one copy of two dimensions. Where all offsets and lengths of plain rows are
multiples of some unit, as those of blocks are, one indexed copy of units does the same.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from inferkit.kv_transfer.engines.runs import Ints

Bytes = npt.NDArray[np.uint8]

SMALL_BYTES = 4 << 10
"""Pieces shorter than this on average are worth a copy more to get them into one."""
MIN_PIECES = 8
MIN_UNIT_BYTES = 64
"""With smaller units an indexed copy is no faster than a loop."""


def addresses(regions: Sequence[Bytes]) -> Ints:
    return np.array([region.__array_interface__["data"][0] for region in regions], dtype=np.int64)


def are_small(places: Ints) -> bool:
    """Whether the pieces of places [n, 5] (runs.py) are many and short."""
    num_pieces = int(places[:, 3].sum())
    num_bytes = int((places[:, 2] * places[:, 3]).sum())
    return num_pieces > MIN_PIECES and num_bytes < SMALL_BYTES * num_pieces


def gather(regions: Sequence[Bytes], places: Ints) -> Bytes:
    """The bytes of all places in one new array."""
    out = np.empty(int((places[:, 2] * places[:, 3]).sum()), np.uint8)
    for region, rows, start, end in _segments(places):
        source, target = regions[region], out[start:end]
        if len(rows) == 1:
            target.reshape(rows[0, 3], rows[0, 2])[:] = pieces_of(source, rows[0])
            continue
        offsets, lengths = rows[:, 1], rows[:, 2]
        unit = _unit(offsets, lengths)
        if unit:
            index = _unit_index(offsets, lengths, unit)
            # Bounds were checked; "clip" is the mode that writes into `out` without a copy.
            np.take(_units(source, unit), index, out=_units(target, unit), mode="clip")
            continue
        position = 0
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            target[position : position + length] = source[offset : offset + length]
            position += length
    return out


def scatter(regions: Sequence[Bytes], places: Ints, data: Bytes) -> None:
    """Undo `gather`: each place gets its bytes of `data`."""
    for region, rows, start, end in _segments(places):
        target, source = regions[region], data[start:end]
        if len(rows) == 1:
            pieces_of(target, rows[0])[:] = source.reshape(rows[0, 3], rows[0, 2])
            continue
        offsets, lengths = rows[:, 1], rows[:, 2]
        unit = _unit(offsets, lengths)
        if unit:
            index = _unit_index(offsets, lengths, unit)
            _units(target, unit)[index] = _units(source, unit)
            continue
        position = 0
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            target[offset : offset + length] = source[position : position + length]
            position += length


def pieces_of(data: Bytes, row: Ints) -> Bytes:
    """[num_pieces, num_bytes] of one row of places, as a view."""
    _, offset, length, num_pieces, stride = row.tolist()
    view: Bytes = np.ndarray(
        (num_pieces, length), np.uint8, buffer=data.data, offset=offset, strides=(stride, 1)
    )
    return view


def _segments(places: Ints) -> Iterator[tuple[int, Ints, int, int]]:
    """(region, rows, start, end): a strided row, or plain rows that follow each other in a region.

    Their bytes are [start, end) of all.
    """
    is_strided = places[:, 3] > 1
    ends = np.cumsum(places[:, 2] * places[:, 3])
    begins = np.ones(len(places), np.bool_)
    begins[1:] = np.diff(places[:, 0]).astype(np.bool_) | is_strided[1:] | is_strided[:-1]
    firsts = np.flatnonzero(begins).tolist()
    start = 0
    for first, last in zip(firsts, [*firsts[1:], len(places)], strict=True):
        end = int(ends[last - 1])
        yield int(places[first, 0]), places[first:last], start, end
        start = end


def _unit(offsets: Ints, lengths: Ints) -> int:
    """The largest number of bytes that divides them all; 0 where it is too small."""
    unit = int(np.gcd(np.gcd.reduce(offsets), np.gcd.reduce(lengths)))
    return unit if unit >= MIN_UNIT_BYTES else 0


def _unit_index(offsets: Ints, lengths: Ints, unit: int) -> Ints:
    counts = lengths // unit
    before = np.cumsum(counts) - counts
    index: Ints = np.repeat(offsets // unit - before, counts) + np.arange(counts.sum())
    return index


def _units(data: Bytes, unit: int) -> npt.NDArray[np.void]:
    return data[: len(data) // unit * unit].view(f"V{unit}")
