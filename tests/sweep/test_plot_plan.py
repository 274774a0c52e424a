from itertools import product
from pathlib import Path

import pytest

from inferkit.sweep.outcomes import Outcome, find_axes
from inferkit.sweep.plot_plan import Plan, in_lines, plan_of


def cells(*overrides: tuple[str, ...]) -> list[Outcome]:
    return [
        Outcome(number=number, overrides=given, status="ok", run_dir=Path("x"))
        for number, given in enumerate(overrides)
    ]


def grid(**axes: tuple[str, ...]) -> list[Outcome]:
    """`grid(a__b=("1", "2"))` sweeps a.b."""
    keys = [key.replace("__", ".") for key in axes]
    points = product(*axes.values())
    return cells(*(tuple(f"{k}={v}" for k, v in zip(keys, point, strict=True)) for point in points))


def plan(of: list[Outcome]) -> Plan:
    found = plan_of(of, find_axes(of))
    assert found is not None
    return found


def test_nothing_varies() -> None:
    assert plan_of(cells(("a.b=1",)), []) is None


def test_numbers_are_on_x_and_texts_make_lines() -> None:
    found = plan(grid(parallel=("tp1", "tp2"), scheduler__batch_size=("8", "1", "64")))

    (column,) = found.columns
    assert column.x.key == "scheduler.batch_size"
    assert column.x.values == ("1", "8", "64")
    assert found.labels == ["tp1", "tp2"]
    assert found.series_title == "parallel"
    assert found.has_lines


def test_the_load_is_on_x_wherever_it_is_swept() -> None:
    found = plan(grid(scheduler__batch_size=("1", "2", "4"), load__rate=("1", "2")))

    assert found.columns[0].x.key == "load.rate"
    assert found.labels == ["1", "2", "4"]


def test_the_smallest_of_three_axes_makes_columns() -> None:
    found = plan(
        grid(
            kv_cache__block_size=("16", "128"),
            scheduler__batch_size=("1", "2", "4", "8"),
            parallel=("tp1", "tp2", "tp4"),
        )
    )

    assert [column.title for column in found.columns] == [
        "kv_cache.block_size=16",
        "kv_cache.block_size=128",
    ]
    assert [len(column.cells) for column in found.columns] == [12, 12]
    assert found.labels == ["tp1", "tp2", "tp4"]


def test_four_axes_join_two_in_a_line() -> None:
    found = plan(grid(a=("1", "2", "3"), b=("x", "y"), c=("p", "q"), d=("m", "n")))

    assert found.columns[0].x.key == "a"
    assert found.series_title == "c, d"
    assert found.labels == ["p, m", "p, n", "q, m", "q, n"]


def test_a_search_has_a_column_for_each_axis_and_no_lines() -> None:
    found = plan(cells(("a=1", "b=2"), ("a=3", "b=7"), ("a=4", "b=1")))

    assert [column.x.key for column in found.columns] == ["a", "b"]
    assert not found.has_lines
    assert found.labels == [""]


def test_texts_have_places_in_their_order() -> None:
    of = grid(model=("qwen3", "llama", "mixtral"))
    (column,) = plan(of).columns

    assert [column.position(cell) for cell in of] == [0.0, 1.0, 2.0]
    assert not plan(of).has_lines


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("1", "2", "4", "8"), True),
        (("1", "64"), False),  # two points have one step
        (("1", "2", "3", "4", "5", "6", "7", "8", "9"), False),
        (("0", "2", "16"), False),
        (("2", "4", "8"), False),
        (("tp1", "tp2"), False),
    ],
)
def test_numbers_that_grow_by_factors_are_on_a_logarithmic_axis(
    values: tuple[str, ...], expected: bool
) -> None:
    (column,) = plan(grid(a=values)).columns

    assert column.is_log is expected


def test_a_cell_that_does_not_set_an_axis_has_its_default() -> None:
    of = cells(("a=1",), ("b=x", "a=1"))

    (axis,) = find_axes(of)
    assert (axis.key, axis.values, axis.is_numeric) == ("b", ("default", "x"), False)


def test_long_values_are_broken_between_words() -> None:
    assert in_lines("parallel=tp2 scheduler.batch_size=8") == "parallel=tp2\nscheduler.batch_size=8"


def test_axes_are_named_as_shortly_as_is_clear() -> None:
    keys = ("load.rate", "scheduler.batch_size", "kv_cache.block_size_of_all", "other.batch_size")
    of = cells(tuple(f"{key}=1" for key in keys), tuple(f"{key}=2" for key in keys))

    assert [axis.name for axis in find_axes(of)] == [
        "load.rate",
        "scheduler.batch_size",
        "block_size_of_all",
        "other.batch_size",
    ]
