from dataclasses import replace

import pytest

from inferkit.inspect.diff.compare import DerivedPair, LeafPair, compare
from inferkit.inspect.diff.wording import (
    derived_texts,
    hand_off_title,
    notes,
    number_text,
    ratio_text,
    reason,
    size_ratio,
)
from inferkit.inspect.snapshot import Leaf
from tests.inspect.diff.snapshots import derived, leaf, snapshot

FOLDER = "conf/parallel"


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        (leaf(1, "default"), leaf(2, "x/y.yaml:3"), "default -> x/y.yaml:3"),
        (leaf(1, f"{FOLDER}/tp2.yaml:3"), leaf(2, f"{FOLDER}/tp4.yaml:4"), None),
        (leaf(1, "a/x.yaml:3"), leaf(2, "b/x.yaml:3"), "a/x.yaml:3 -> b/x.yaml:3"),
        (leaf(1, "a/x.yaml:3"), leaf(2, "a/x.yaml:3"), "a/x.yaml:3"),
        (leaf(1, ":"), leaf(2, ":"), "command line"),
        (leaf(1), leaf(2, ":"), "command line"),
        (None, leaf(2, "default"), "default"),
        (leaf(1), leaf(2), ""),
    ],
)
def test_who_set_two_values(left: Leaf | None, right: Leaf, text: str | None) -> None:
    folded = f"{FOLDER}/tp2.yaml:3 -> tp4.yaml:4"
    assert reason(LeafPair(key="k", left=left, right=right)) == (folded if text is None else text)


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [(2, 1, "x0.5"), (3, 1, "x0.333"), (1, 2500, "x2,500"), (10000, 10001, ""), (0, 1, "")],
)
def test_ratios(left: int, right: int, text: str) -> None:
    assert ratio_text(left, right) == text
    assert ratio_text(None, right) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567, "1,234,567"), (2.0, "2"), (0.00012346, "0.0001235"), (1234.5, "1,234")],
)
def test_figures(value: float, text: str) -> None:
    assert number_text(value) == text


def test_sizes_that_look_alike_are_told_in_every_digit() -> None:
    pair = DerivedPair(
        name="x",
        left=derived("x", 200 * 2**20, "bytes", "200 MiB"),
        right=derived("x", 200 * 2**20 + 1, "bytes", "200 MiB"),
    )

    assert derived_texts(pair) == ("209,715,200 bytes", "209,715,201 bytes")
    assert size_ratio(pair) == ""


@pytest.mark.parametrize(
    ("left", "right", "texts"),
    [
        ((983_040, "983,040 bytes"), (2_949_120, "2.8 MiB"), ("0.9 MiB", "2.8 MiB")),
        ((4096, "4,096 bytes"), (2**21, "2.0 MiB"), ("4,096 bytes", "2,097,152 bytes")),
        ((4096, "4,096 bytes"), (8192, "8,192 bytes"), ("4,096 bytes", "8,192 bytes")),
    ],
)
def test_sizes_of_a_row_are_in_one_unit(
    left: tuple[int, str], right: tuple[int, str], texts: tuple[str, str]
) -> None:
    one, other = (derived("x", value, "bytes", text) for value, text in (left, right))

    assert derived_texts(DerivedPair(name="x", left=one, right=other)) == texts


def test_what_no_memory_was_looked_at_for_is_told_as_a_bound() -> None:
    blocks = replace(derived("kv_cache.blocks", 25, "blocks"), is_at_most=True)
    sides = [
        snapshot(leaves={"kv_cache.mem_fraction": value}, derived=(blocks,)) for value in (0.1, 0.2)
    ]
    pair = DerivedPair(name="x", left=blocks, right=derived("x", 5, "blocks"))

    assert derived_texts(pair) == ("at most 25", "5")
    assert notes(compare(*sides)) == [
        "what follows from kv_cache.mem_fraction is not known, as no memory is looked at; it is "
        "with platform.device_memory=BYTES"
    ]
    assert notes(compare(sides[0], sides[0])) == []


def test_counts_are_numbers_and_have_no_ratio() -> None:
    pair = DerivedPair(
        name="x", left=derived("x", 1000, "requests", "1000 of 288 tokens"), right=None
    )

    assert derived_texts(pair) == ("1,000", "none")
    assert size_ratio(pair) == ""


def test_why_derived_values_are_missing() -> None:
    known = snapshot(derived=(derived("x", 1),))

    def told(**facts: object) -> list[str]:
        return notes(compare(known, snapshot(**facts)))

    assert told(faults=("f",)) == ["B: derived values are not compared: it cannot run"]
    assert told(role="router") == ["B: derived values are not compared: it has no ranks itself"]
    assert told() == ["B: derived values are not compared: its own are not known"]


def test_notes_of_both_sides_are_told_once() -> None:
    found = compare(snapshot(notes=("x", "y")), snapshot(notes=("z", "x")))

    assert notes(found) == ["A and B: x", "A: y", "B: z"]


def test_a_hand_off_needs_two_sides_that_can_run() -> None:
    prefill = snapshot(role="prefill")

    assert hand_off_title(compare(prefill, snapshot(role="decode"))) == "possible"
    broken = snapshot(role="decode", faults=("f",))
    assert hand_off_title(compare(prefill, broken)) == "possible once no rules are broken"
    other = snapshot(role="decode", leaves={"kv_cache.block_size": 1})
    assert hand_off_title(compare(prefill, other)).startswith("not possible, these must be equal")
