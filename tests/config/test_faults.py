import shlex

import pytest

from inferkit.config.faults import (
    Cell,
    Command,
    Fault,
    Fix,
    closest,
    render,
    render_cells,
    shell_quote,
    show,
)
from inferkit.config.schema import DType


def test_show_writes_values_as_the_command_line_does() -> None:
    assert show(None) == "null"
    assert show(True) == "true"
    assert show(DType.bfloat16) == "bfloat16"
    assert show([1, "a", None]) == "[1,a,null]"
    assert show({"a": [1]}) == "{a:[1]}"
    assert show(0.5) == "0.5"


@pytest.mark.parametrize(
    "word", ["plain=1", "a='~/x'", 'a="x y"', "a=[1,2]", "a=$HOME", "a='$x'", "~a", 'a=it\'s "q"']
)
def test_quoted_words_survive_a_shell(word: str) -> None:
    assert shlex.split(shell_quote(word)) == [word]


def test_closest_ignores_case() -> None:
    assert closest("longbench", ["default", "LongBench"]) == "LongBench"
    assert closest("zzz", ["default"]) is None


def test_fixes_take_the_place_of_what_they_replace() -> None:
    command = Command(overrides=("+model=llama", "data.limit=0", "scheduler.bath_size=3"))

    fixed = command.fixed(
        [
            Fix(add=("data.limit=1",)),
            Fix(add=("scheduler.batch_size=3",), drop=("scheduler.bath_size",)),
            Fix(add=("model=llama",)),
            Fix(add=("data.seed=1",), flag="-m"),
            Fix(drop=("data.seed",)),
        ]
    )

    assert fixed.overrides == ("model=llama", "data.limit=1", "scheduler.batch_size=3")
    assert fixed.flags == ("-m",)


def test_a_renamed_key_keeps_its_value() -> None:
    command = Command(overrides=("+scheduler.bath_size=1,2", "data.limit=3"))

    renamed = command.renamed("scheduler.bath_size", "scheduler.batch_size")

    assert renamed.overrides == ("scheduler.batch_size=1,2", "data.limit=3")


def test_render() -> None:
    faults = [
        Fault(
            key="scheduler.bath_size",
            given="scheduler.bath_size=3",
            problem="there is no such key; did you mean scheduler.batch_size?",
        ),
        Fault(key="model.path", problem="has no value; set model.path=..."),
    ]
    works = Command(flags=("-m",), overrides=("model.path='~/x'", "data.limit=1,2"))

    assert render(faults, works=works) == (
        "inferkit: 2 faults in the configuration; nothing was started\n"
        "\n"
        "  scheduler.bath_size=3\n"
        "      there is no such key; did you mean scheduler.batch_size?\n"
        "\n"
        "  model.path\n"
        "      has no value; set model.path=...\n"
        "\n"
        "this works:\n"
        "  python -m inferkit -m \"model.path='~/x'\" data.limit=1,2"
    )


def test_long_problems_are_wrapped_and_nothing_is_broken_in_two() -> None:
    path = "/a/" + "very-long-name/" * 9
    text = render([Fault(key="k", problem=f"does not exist: {path} and so on " * 2)])

    assert all(len(line) <= 100 or path in line for line in text.splitlines())
    assert path in text


def cells(*rows: str) -> list[Cell]:
    return [Cell(number=n, overrides=tuple(row.split())) for n, row in enumerate(rows)]


def test_render_cells_tells_each_fault_once() -> None:
    grid = cells("a=1 b=1 c=0", "a=1 b=2 c=0", "a=2 b=1 c=0", "a=2 b=2 c=0")
    bad = Fault(key="a", given="a=2", problem="is too much")

    assert render_cells(grid, {2: [bad], 3: [bad]}, works=Command(overrides=("a=1",))) == (
        "inferkit: 2 of 4 cells cannot run; nothing was started\n"
        "\n"
        "  cell #2 [a=2 b=1]\n"
        "  cell #3 [a=2 b=2]\n"
        "      a=2: is too much\n"
        "\n"
        "this works:\n"
        "  python -m inferkit a=1"
    )


def test_render_cells_tells_faults_of_all_cells_apart() -> None:
    grid = cells("a=1 b=0", "a=2 b=0")
    common = Fault(key="b", given="b=0", problem="is nothing")
    faults = {
        0: [common, Fault(key="x", given="x=1", problem="is unknown")],
        1: [common, Fault(key="x", given="x=2", problem="is unknown")],
    }

    assert render_cells(grid, faults) == (
        "inferkit: 2 of 2 cells cannot run; nothing was started\n"
        "\n"
        "  every cell: b=0\n"
        "      is nothing\n"
        "\n"
        "  every cell: x\n"
        "      is unknown"
    )


def test_render_cells_counts_what_it_does_not_show() -> None:
    grid = cells(*(f"a={n}" for n in range(20)))
    bad = Fault(key="k", problem="is bad")

    text = render_cells(grid, {n: [bad] for n in range(1, 15)})

    assert "  cell #8 [a=8]\n  and 6 more: #9-#14\n      k: is bad" in text
