"""Many small runs at once: into one buffer, or out of one. Knows no peer.

Places are [n, 3] (region, offset, num_bytes), as `runs.expand` gives them. Copying them one by one
costs half a microsecond of Python each, with the interpreter's lock taken. Where all offsets and
lengths are multiples of some unit, as those of heads and blocks are, one indexed copy of units does
the same.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from inferkit.kv_transfer.engines.runs import Ints

Bytes = npt.NDArray[np.uint8]

SMALL_BYTES = 4 << 10
"""Runs shorter than this on average are worth a copy more to get them into one piece."""
MIN_UNIT_BYTES = 64
"""With smaller units an indexed copy is no faster than a loop."""


def are_small(places: Ints) -> bool:
    return len(places) > 8 and int(places[:, 2].sum()) < SMALL_BYTES * len(places)


def addresses(regions: Sequence[Bytes]) -> Ints:
    return np.array([region.__array_interface__["data"][0] for region in regions], dtype=np.int64)


def gather(regions: Sequence[Bytes], places: Ints) -> Bytes:
    """The bytes of all places in one new array."""
    out = np.empty(int(places[:, 2].sum()), np.uint8)
    for region, offsets, lengths, start, end in _segments(places):
        source, target = regions[region], out[start:end]
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
    for region, offsets, lengths, start, end in _segments(places):
        target, source = regions[region], data[start:end]
        unit = _unit(offsets, lengths)
        if unit:
            index = _unit_index(offsets, lengths, unit)
            _units(target, unit)[index] = _units(source, unit)
            continue
        position = 0
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            target[offset : offset + length] = source[position : position + length]
            position += length


def _segments(places: Ints) -> Iterator[tuple[int, Ints, Ints, int, int]]:
    """(region, offsets, lengths, start, end) of neighbours in one region.

    Their bytes are [start, end) of all.
    """
    regions, offsets, lengths = places.T
    ends = np.cumsum(lengths)
    firsts = np.flatnonzero(np.diff(regions, prepend=-1)).tolist()
    for first, last in zip(firsts, [*firsts[1:], len(places)], strict=True):
        start = int(ends[first] - lengths[first])
        part = slice(first, last)
        yield int(regions[first]), offsets[part], lengths[part], start, int(ends[last - 1])


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
