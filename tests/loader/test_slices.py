"""Which elements a part of a tensor has, and where they lie in a file."""

import itertools

import pytest
import torch

from inferkit.loader.slices import complete_index, contiguous_runs, part_shape

BOUNDS = [slice(None), slice(0, 2), slice(1, 3), slice(2, 9), slice(1, 1), slice(3, 1)]


@pytest.mark.parametrize("num_dims", [0, 1, 2, 3])
def test_runs_have_the_elements_of_the_part_in_order(num_dims: int) -> None:
    shape = (3, 4, 5)[:num_dims]
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for num_slices in range(num_dims + 1):
        for index in itertools.product(BOUNDS, repeat=num_slices):
            part = complete_index(shape, index)
            expected = tensor[index]
            assert part_shape(part) == tuple(expected.shape)
            run_len, starts = contiguous_runs(shape, part)
            found = [start + idx for start in starts for idx in range(run_len)]
            assert found == expected.flatten().tolist(), index


@pytest.mark.parametrize(
    ("index", "run_len", "starts"),
    [
        ((), 60, [0]),
        ((slice(1, 3),), 40, [20]),
        ((slice(None), slice(1, 3)), 10, [5, 25, 45]),
        ((slice(1, 2), slice(1, 3)), 10, [25]),
        ((slice(1, 2), slice(1, 3), slice(0, 4)), 4, [25, 30]),
        ((slice(None), slice(None), slice(2, 5)), 3, [2 + 5 * row for row in range(12)]),
    ],
)
def test_runs_are_as_long_as_can_be(
    index: tuple[slice, ...], run_len: int, starts: list[int]
) -> None:
    shape = (3, 4, 5)
    assert contiguous_runs(shape, complete_index(shape, index)) == (run_len, starts)


@pytest.mark.parametrize("part", [slice(0, 4, 2), slice(-2, None), slice(0, -1)])
def test_other_slices_are_refused(part: slice) -> None:
    with pytest.raises(AssertionError, match="step 1 with bounds >= 0"):
        complete_index((4,), (part,))


def test_more_slices_than_dimensions_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"2 slices for a tensor of shape \(4,\)"):
        complete_index((4,), (slice(None), slice(None)))
