"""Parts of tensors: one slice per dimension, and where such a part lies in a file."""

from collections.abc import Sequence
from math import prod

import numpy as np

Index = tuple[slice, ...]


def complete_index(shape: Sequence[int], index: Sequence[slice]) -> Index:
    """One slice with both bounds per dimension; the dimensions without one are taken whole.

    `index` has slices of step 1 with bounds >= 0 for leading dimensions; like Python's own they
    end where the dimension ends.
    """
    assert len(index) <= len(shape), f"{len(index)} slices for a tensor of shape {tuple(shape)}"
    complete = []
    for dim, size in enumerate(shape):
        part = index[dim] if dim < len(index) else slice(None)
        assert part.step in (None, 1) and min(part.start or 0, part.stop or 0) >= 0, (
            f"allowed are slices of step 1 with bounds >= 0, not {part}"
        )
        start, stop, _ = part.indices(size)
        complete.append(slice(start, max(start, stop)))
    return tuple(complete)


def part_shape(index: Index) -> tuple[int, ...]:
    """The shape of the part that a complete index selects."""
    return tuple(part.stop - part.start for part in index)


def contiguous_runs(shape: Sequence[int], index: Index) -> tuple[int, list[int]]:
    """(elements per run, first element of each run) of a part of a row-major tensor, in order.

    `index` is complete. The runs are as long as can be: dimensions that are taken whole join
    those above them.
    """
    sizes = part_shape(index)
    inner = len(shape)
    while inner > 0 and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    # Dimensions from `inner` on are whole; `inner - 1`, if there is one, is cut: a run each.
    starts = np.zeros(1, dtype=np.int64)
    for dim in range(inner):
        part = index[dim]
        positions = np.array([part.start]) if dim == inner - 1 else np.arange(part.start, part.stop)
        starts = (starts[:, None] + positions * prod(shape[dim + 1 :])).reshape(-1)
    return prod(sizes[max(inner - 1, 0) :]), starts.tolist()
