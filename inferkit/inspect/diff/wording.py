"""How values, origins and ratios are written, alike in text and in markdown."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inferkit.config.origins import AUTOMATIC, PRIMARY, SCHEMA
from inferkit.inspect.derived import WITHOUT_RANKS
from inferkit.inspect.diff.compare import ChoicePair, Comparison, DerivedPair, LeafPair
from inferkit.inspect.diff.metrics import MetricPair
from inferkit.inspect.recorded import FILE
from inferkit.inspect.snapshot import Derived, Leaf, Origin, Snapshot
from inferkit.inspect.wording import BYTES, derived_text, exact_text, share_text, value_text

ARROW = "->"
NONE = "none"
NO_EFFECT = "no effect: both come to the same configuration"
SAME = "the two are the same"
OTHER_MEMORY = "how many blocks fitted into the memory of the ranks is no part of it"
ROLE = "role"
ALONE = "every rank alone"
MIB = " MiB"
TENTH_OF_MIB = 2**20 // 10
MEMORY_KEYS = ("kv_cache.mem_fraction",)
"""Keys from which something follows only where the memory of a rank is known."""


def leaf_text(leaf: Leaf | None) -> str:
    return NONE if leaf is None else value_text(leaf.value)


def derived_texts(pair: DerivedPair) -> tuple[str, str]:
    """Both values: numbers with every digit, large sizes in MiB, groups as their ranks."""
    if pair.left is None or pair.right is None:
        left, right = (
            NONE if one is None else _derived_text(one) for one in (pair.left, pair.right)
        )
        return left, right
    if pair.left.unit == pair.right.unit == BYTES:
        return _sizes(pair.left, pair.right)
    return _derived_text(pair.left), _derived_text(pair.right)


def _sizes(left: Derived, right: Derived) -> tuple[str, str]:
    """Both in one unit: in MiB, unless they are too small for it or look alike then."""
    texts = [derived_text(one) for one in (left, right)]
    if texts[0] == texts[1]:
        texts = [_exact(one) for one in (left, right)]
    elif any(MIB in text for text in texts) and not all(MIB in text for text in texts):
        if min(left.value, right.value) >= TENTH_OF_MIB:
            texts = [
                text
                if MIB in text
                else derived_text(replace(one, text=f"{one.value / 2**20:.1f} MiB"))
                for one, text in zip((left, right), texts, strict=True)
            ]
        else:
            texts = [_exact(one) for one in (left, right)]
    return texts[0], texts[1]


def _exact(one: Derived) -> str:
    return derived_text(replace(one, text=exact_text(one)))


def _derived_text(one: Derived) -> str:
    """Of counts the number, and what share of each it is."""
    is_number = isinstance(one.value, int) and not isinstance(one.value, bool)
    if not is_number or one.unit == BYTES:
        return derived_text(one)
    share = share_text(one)
    return _exact(one) + (f", {share}" if share else "")


def leaf_rows(comparison: Comparison) -> list[LeafPair]:
    """Keys that differ, without the role where it is among the choices."""
    chosen = {pair.group for pair in comparison.choices}
    return [pair for pair in comparison.leaves if pair.key != ROLE or ROLE not in chosen]


def group_rows(comparison: Comparison) -> dict[tuple[str, str], list[str]]:
    """(ranks of A, ranks of B) -> names of the groups that differ so."""
    rows: dict[tuple[str, str], list[str]] = {}
    for pair in comparison.derived:
        if pair.is_group:
            left, right = derived_texts(pair)
            texts = (ALONE if pair.left is None else left, ALONE if pair.right is None else right)
            name = ".".join(part for part in pair.name.split(".") if part != "groups")
            rows.setdefault(texts, []).append(name)
    return rows


def origin_text(leaf: Leaf | None) -> str:
    """Who set a value; empty = not known."""
    return _last(leaf.origins) if leaf is not None else ""


def _last(origins: Sequence[Origin]) -> str:
    if not origins:
        return ""
    origin = origins[-1]
    if origin.kind in (SCHEMA, PRIMARY):
        return "default"
    if origin.kind == AUTOMATIC:
        return f"automatic: {origin.text}" if origin.text else "automatic"
    if origin.kind == FILE and origin.line:
        return f"line {origin.line}"  # of the side itself
    return origin.place or origin.kind


def reason(pair: LeafPair) -> str:
    """Who set the two values: `default -> conf/parallel/tp16.yaml:2`; one that is equal once.

    Of two files in one folder the folder is named once: `conf/parallel/tp2.yaml:3 -> tp4.yaml:3`.
    """
    return _both(origin_text(pair.left), origin_text(pair.right))


def chooser(pair: ChoicePair) -> str:
    """Who chose the two options."""
    return _both(_last(pair.left_origins), _last(pair.right_origins))


def _both(left: str, right: str) -> str:
    if not left or not right or left == right:
        return right or left
    folder = left.rpartition("/")[0]
    if folder and folder == right.rpartition("/")[0] and " " not in left:
        right = right.removeprefix(f"{folder}/")
    return f"{left} {ARROW} {right}"


def ratio_text(left: Any, right: Any) -> str:
    """`x0.52`; empty where there is none, or where it would say 1."""
    numbers = [v for v in (left, right) if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < 2 or not left:
        return ""
    ratio = right / left
    text = f"{ratio:.3g}" if abs(ratio) < 1000 else f"{ratio:,.0f}"
    return "" if text == "1" else f"x{text}"


def size_ratio(pair: DerivedPair) -> str:
    """The ratio of two sizes in bytes; of counts it says nothing that their numbers do not."""
    sides = [one for one in (pair.left, pair.right) if one is not None and one.unit == BYTES]
    return ratio_text(sides[0].value, sides[1].value) if len(sides) == 2 else ""


def number_text(value: float) -> str:
    """Four digits of a measured figure, every digit of a count."""
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def verdict_text(pair: MetricPair) -> str:
    ratio = ratio_text(pair.left, pair.right)
    return " ".join(part for part in (ratio, pair.verdict) if part)


def verdict(comparison: Comparison) -> str:
    """The sentence that stands for a comparison without an effect; else empty."""
    if comparison.has_effect:
        return ""
    text = NO_EFFECT if comparison.choices else SAME
    return f"{text}; {OTHER_MEMORY}" if comparison.derived else text


def hand_off_title(comparison: Comparison) -> str:
    """Whether one side can hand KV over to the other."""
    found = comparison.hand_off
    assert found is not None, "only prefill and decode have a hand-off"
    if not found.is_possible:
        return "not possible, these must be equal and are not:"
    if comparison.faults:
        return "possible once no rules are broken"
    return "possible"


def titles(comparison: Comparison) -> tuple[tuple[str, str], tuple[str, str]]:
    """Letter and title of both."""
    return ("A", comparison.left.title), ("B", comparison.right.title)


def notes(comparison: Comparison) -> list[str]:
    """What could not be found out, with the side of which it is said."""
    left, right = comparison.left, comparison.right
    both = [f"A and B: {text}" for text in left.notes if text in right.notes]
    found = [*both, *(f"A: {text}" for text in left.notes if text not in right.notes)]
    found += [f"B: {text}" for text in right.notes if text not in left.notes]
    of_memory = [pair.key for pair in comparison.leaves if pair.key in MEMORY_KEYS]
    if of_memory and any(one.is_at_most for one in (*left.derived, *right.derived)):
        found.append(
            f"what follows from {', '.join(of_memory)} is not known, as no memory is looked at; "
            "it is with platform.device_memory=BYTES"
        )
    for letter, side, other in (("A", left, right), ("B", right, left)):
        if not side.derived and other.derived:
            found.append(f"{letter}: derived values are not compared: {_without_derived(side)}")
    return found


def _without_derived(side: Snapshot) -> str:
    if side.faults:
        return "it cannot run"
    return "it has no ranks itself" if side.role in WITHOUT_RANKS else "its own are not known"
