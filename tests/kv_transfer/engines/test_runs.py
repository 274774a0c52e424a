import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferkit.kv_transfer.engines.copies import are_small, gather, scatter
from inferkit.kv_transfer.engines.runs import (
    LOCAL,
    REMOTE,
    TransferEngineError,
    as_runs,
    check_bounds,
    expand,
    expand_runs,
    first_outside,
    num_bytes,
    split,
)

MIB = 1 << 20


def inside_slowly(place: list[int], sizes: list[int]) -> bool:
    region, offset, length, pieces, stride = place
    if not 0 <= region < len(sizes) or length < 1 or pieces < 1 or offset < 0:
        return False
    if pieces > 1 and stride < length:
        return False
    return offset + (pieces - 1) * stride + length <= sizes[region]


NUMBERS = st.one_of(st.integers(-3, 40), st.sampled_from([2**62, 2**63 - 1, -(2**63)]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(NUMBERS, min_size=5, max_size=5), min_size=1, max_size=5))
def test_bounds_are_those_of_plain_arithmetic(rows: list[list[int]]) -> None:
    sizes = [30, 0, 7]
    found = first_outside(np.array(rows, np.int64), np.array(sizes, np.int64))
    bad = [row for row, place in enumerate(rows) if not inside_slowly(place, sizes)]
    assert found == (bad[0] if bad else None)


def test_the_error_names_the_run_and_the_region() -> None:
    sizes = np.array([100], np.int64)
    runs = as_runs([(0, 0, 0, 0, 5), (0, 0, 0, 10, 20, 3, 40, 45)][1:])
    check_bounds(runs[:, LOCAL], sizes, "our")
    with pytest.raises(TransferEngineError, match=r"run 0 takes 3 pieces, 45 bytes apart, of 20"):
        check_bounds(runs[:, REMOTE], sizes, "their")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 999, 40_000, MIB, 4 * MIB, 9 * MIB + 17]), st.integers(1, 40)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_parts_hold_the_same_bytes_and_are_small_enough(shape: list[tuple[int, int]]) -> None:
    runs = as_runs([(0, 7, 1, 9, n, pieces, 2 * n, 3 * n) for n, pieces in shape])
    parts = split(runs, 4 * MIB)
    assert all(0 < num_bytes(part) <= 4 * MIB for part in parts)
    assert sum(map(num_bytes, parts)) == num_bytes(runs)
    bytes_of = [{}, {}]
    for table, rows in zip(bytes_of, (runs, np.concatenate(parts)), strict=True):
        for _, local, _, remote, n, *_ in expand_runs(rows).tolist():
            # Every piece is an interval with a constant distance: compare their unions.
            table.setdefault(remote - local, []).append((local, local + n))
    assert {k: union(v) for k, v in bytes_of[0].items()} == {
        k: union(v) for k, v in bytes_of[1].items()
    }


def union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def test_pieces_that_touch_become_one() -> None:
    places = as_runs([(0, 0, 0, 0, 10, 4, 10, 20), (0, 40, 0, 80, 5, 1, 0, 0)])
    assert expand(places[:, LOCAL]).tolist() == [[0, 0, 45]]
    assert expand(places[:, REMOTE]).tolist() == [
        *([0, 20 * i, 10] for i in range(4)),
        [0, 80, 5],
    ]


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([1, 32, 64, 192]),
    st.lists(
        st.tuples(
            st.integers(0, 1), st.integers(1, 3), st.integers(0, 2), st.sampled_from([1, 1, 4])
        ),
        min_size=1,
        max_size=30,
    ),
)
def test_scatter_undoes_gather(unit: int, spots: list[tuple[int, int, int, int]]) -> None:
    """For strided rows, for units that are copied by index, and for smaller ones in a loop."""
    rng = np.random.default_rng(len(spots))
    regions = [rng.integers(0, 256, 31 * 24 * unit + 5, dtype=np.uint8) for _ in range(2)]
    places = np.array(
        [
            (region, (24 * i + shift) * unit, length * unit, pieces, (length + 1) * unit)
            for i, (region, length, shift, pieces) in enumerate(spots)
        ],
        np.int64,
    )
    data = gather(regions, places)
    plain = expand(places)
    assert np.array_equal(
        data, np.concatenate([regions[r][o : o + n] for r, o, n in plain.tolist()])
    )
    empty = [np.zeros_like(region) for region in regions]
    scatter(empty, places, data)
    assert np.array_equal(gather(empty, places), data)
    assert sum(map(np.count_nonzero, empty)) == np.count_nonzero(data)


def test_few_or_long_pieces_are_not_small() -> None:
    assert are_small(np.array([[0, 0, 100, 1, 0]] * 20))
    assert are_small(np.array([[0, 0, 100, 20, 100]]))
    assert not are_small(np.array([[0, 0, 100, 1, 0]] * 4))
    assert not are_small(np.array([[0, 0, 10_000, 1, 0]] * 20))
