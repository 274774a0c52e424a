"""Arithmetic on batches of runs; knows no memory and no peer.

A batch is [n, 8] int64 with the columns of `inferkit.core.protocols.StridedRun`. One side of it is
`places` [n, 5]: region, offset, num_bytes, num_pieces, stride.
"""

import numpy as np
import numpy.typing as npt

from inferkit.core.errors import InferkitError
from inferkit.core.protocols import StridedRun

Ints = npt.NDArray[np.int64]

NUM_COLUMNS = len(StridedRun._fields)
LOCAL = (0, 1, 4, 5, 6)
REMOTE = (2, 3, 4, 5, 7)
LOCAL_OFFSET, REMOTE_OFFSET, NUM_BYTES, NUM_PIECES = 1, 3, 4, 5
STRIDES = slice(6, 8)


class TransferEngineError(InferkitError, RuntimeError):
    """A transfer that cannot be posted, or an engine that cannot run."""


def as_runs(rows: npt.ArrayLike) -> Ints:
    """[n, 8] int64, n >= 1, as a copy that the caller cannot change any more.

    Raises:
        TransferEngineError: another shape, or numbers that are not whole.
    """
    given = np.asarray(rows)
    is_table = given.ndim == 2 and len(given) and given.dtype.kind in "iu"
    if not is_table or given.shape[1] not in (5, NUM_COLUMNS):
        raise TransferEngineError(
            f"a batch is a non-empty array of integers, [n, 5] (Run) or [n, 8] (StridedRun), not "
            f"{given.dtype} {list(given.shape)}"
        )
    runs = np.zeros((len(given), NUM_COLUMNS), np.int64)
    runs[:, NUM_PIECES] = 1
    runs[:, : given.shape[1]] = given
    runs[runs[:, NUM_PIECES] == 1, STRIDES] = 0
    return runs


def first_outside(places: Ints, sizes: Ints) -> int | None:
    """The first row of `places` that does not lie inside its region, or None.

    `sizes` [regions] has bytes; a region of size 0 cannot be written. Pieces do not overlap.
    Nothing is multiplied before it is known to be small, so nothing overflows.
    """
    regions, offsets, lengths, pieces, strides = places.T
    is_known = (regions >= 0) & (regions < len(sizes))
    limits = np.zeros_like(lengths)
    limits[is_known] = sizes[regions[is_known]]
    is_inside = (lengths > 0) & (lengths <= limits) & (offsets >= 0) & (pieces > 0)
    is_inside &= (strides >= lengths) | (pieces == 1)
    room = np.where(is_inside, limits - lengths, 0)
    if (pieces == 1).all():
        is_inside &= offsets <= room
        return None if is_inside.all() else int(np.argmin(is_inside))
    gaps = np.where(is_inside, pieces - 1, 0)
    steps = np.where(is_inside & (gaps > 0), strides, 1)
    is_inside &= gaps <= room // steps
    is_inside &= offsets <= room - np.where(is_inside, gaps * steps, 0)
    return None if is_inside.all() else int(np.argmin(is_inside))


def check_bounds(places: Ints, sizes: Ints, whose: str) -> None:
    """Raises TransferEngineError that names the first row outside the regions."""
    row = first_outside(places, sizes)
    if row is None:
        return
    region, offset, length, pieces, stride = places[row].tolist()
    size = f"has {sizes[region]} bytes" if 0 <= region < len(sizes) else f"is none of {len(sizes)}"
    many = f"{pieces} pieces, {stride} bytes apart, of " if pieces != 1 else ""
    raise TransferEngineError(
        f"run {row} takes {many}{length} bytes at offset {offset} of {whose} region {region}, "
        f"which {size}; a run has at least one byte, its pieces do not overlap, and all of it lies "
        "inside one registered region"
    )


def num_bytes(rows: Ints) -> int:
    return int((rows[:, NUM_BYTES] * rows[:, NUM_PIECES]).sum())


def split(runs: Ints, part_bytes: int) -> list[Ints]:
    """Parts of at most `part_bytes`, of whole rows; rows that are longer are cut before."""
    if num_bytes(runs) <= part_bytes:
        return [runs]
    runs = _cut(runs, part_bytes)
    ends = np.cumsum(runs[:, NUM_BYTES] * runs[:, NUM_PIECES])
    parts = []
    first, start = 0, 0
    while first < len(runs):
        last = int(np.searchsorted(ends, start + part_bytes, side="right"))
        parts.append(runs[first:last])
        first, start = last, int(ends[last - 1])
    return parts


def _cut(runs: Ints, row_bytes: int) -> Ints:
    """Rows of at most `row_bytes` each."""
    is_huge = (runs[:, NUM_BYTES] > row_bytes) & (runs[:, NUM_PIECES] > 1)
    if is_huge.any():
        runs = np.concatenate((runs[~is_huge], expand_runs(runs[is_huge])))
    lengths, pieces = runs[:, NUM_BYTES], runs[:, NUM_PIECES]
    is_one = pieces == 1
    # A row of one piece is cut into bytes, a strided one into pieces.
    per_row = np.where(is_one, row_bytes, row_bytes // np.minimum(lengths, row_bytes))
    units = np.where(is_one, lengths, pieces)
    counts = -(-units // per_row)
    if (counts == 1).all():
        return runs
    source = np.repeat(np.arange(len(runs)), counts)
    done = (np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)) * per_row[
        source
    ]
    left = np.minimum(units[source] - done, per_row[source])
    cut = runs[source]
    is_one = is_one[source]
    steps = np.where(is_one[:, None], 1, cut[:, STRIDES])
    cut[:, LOCAL_OFFSET] += done * steps[:, 0]
    cut[:, REMOTE_OFFSET] += done * steps[:, 1]
    cut[is_one, NUM_BYTES] = left[is_one]
    cut[~is_one, NUM_PIECES] = left[~is_one]
    return cut


def expand_runs(runs: Ints) -> Ints:
    """A row for each piece; [m, 8]."""
    index, step = _pieces(runs[:, NUM_PIECES])
    expanded = runs[index]
    expanded[:, LOCAL_OFFSET] += step * expanded[:, 6]
    expanded[:, REMOTE_OFFSET] += step * expanded[:, 7]
    expanded[:, NUM_PIECES], expanded[:, STRIDES] = 1, 0
    return expanded


def expand(places: Ints) -> Ints:
    """[m, 3] (region, offset, num_bytes): a row for each piece; pieces that touch are one."""
    pieces = places[:, 3]
    if (pieces == 1).all():
        return _merge(places[:, :3])
    index, step = _pieces(pieces)
    expanded = places[index, :3]
    expanded[:, 1] += step * places[index, 4]
    return _merge(expanded)


def _pieces(counts: Ints) -> tuple[Ints, Ints]:
    """For each piece its row and its number in the row."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def _merge(places: Ints) -> Ints:
    """Rows (region, offset, num_bytes) with neighbours that touch made one."""
    if len(places) == 1:
        return places
    regions, offsets, lengths = places.T
    touches = (regions[1:] == regions[:-1]) & (offsets[1:] == offsets[:-1] + lengths[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~touches)))
    merged = places[starts]
    merged[:, 2] = np.add.reduceat(lengths, starts)
    return merged
