"""Two snapshots against each other. Pure: knows neither where they come from nor how they look."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inferkit.config.automatic import AUTOMATIC_KEYS
from inferkit.config.origins import AUTOMATIC
from inferkit.config.resolve import AUTO_PLATFORM
from inferkit.inspect.circumstances import DECIDING_FILES
from inferkit.inspect.diff.hand_off import HandOff, hand_off
from inferkit.inspect.diff.metrics import MetricPair, compare_metrics
from inferkit.inspect.snapshot import Derived, Leaf, Origin, Snapshot
from inferkit.inspect.wording import share_text

UNRESOLVED = (0, None, AUTO_PLATFORM)
"""How automatic values are written."""
MODEL_SIZE = ".model.parameters"
"""A derived value that is known where the model's shape is."""


@dataclass(frozen=True, kw_only=True)
class ChoicePair:
    """A group of which the sides choose different options; None = none of it."""

    group: str
    left: str | None
    right: str | None
    left_origins: tuple[Origin, ...] = ()
    """All who chose, the last one won; empty = not known."""
    right_origins: tuple[Origin, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LeafPair:
    """A key whose values differ; None = a side does not have it."""

    key: str
    left: Leaf | None
    right: Leaf | None


@dataclass(frozen=True, kw_only=True)
class DerivedPair:
    """A derived value that differs; None = a side does not have it."""

    name: str
    left: Derived | None
    right: Derived | None

    @property
    def is_group(self) -> bool:
        """Whether it is a group of ranks: which of them work together on something."""
        return is_group(self.name)

    @property
    def is_recorded(self) -> bool:
        """Whether a side has it from a run, whose machine had the memory for so much."""
        return any(one is not None and one.is_recorded for one in (self.left, self.right))


@dataclass(frozen=True, kw_only=True)
class CircumstancePair:
    """Something with which two runs were made, and that differs; None = a side lacks it."""

    name: str
    left: str | None
    right: str | None


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Faults or warnings, by who has them."""

    left: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    both: tuple[str, ...] = ()

    @property
    def differ(self) -> bool:
        return bool(self.left or self.right)

    def __bool__(self) -> bool:
        return bool(self.left or self.right or self.both)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything in which two configurations differ."""

    left: Snapshot
    right: Snapshot
    choices: tuple[ChoicePair, ...]
    leaves: tuple[LeafPair, ...]
    """In the order of the schema."""
    derived: tuple[DerivedPair, ...]
    """Empty where those of a side are not known."""
    faults: Sentences
    warnings: Sentences
    circumstances: tuple[CircumstancePair, ...]
    """Of two run directories: code, versions, files, machine."""
    metrics: tuple[MetricPair, ...]
    """Of two run directories; all figures that both have, equal ones too."""
    hand_off: HandOff | None
    """Where one side is prefill and the other decode."""

    @property
    def has_effect(self) -> bool:
        """Whether the two mean different things. Other names for equal values do not count, nor
        do warnings (they follow from what was typed), nor what two runs were made with, found on
        their machine and came to; but other files of model or data set do."""
        made_of_others = any(p.name.startswith(DECIDING_FILES) for p in self.circumstances)
        derived = [pair for pair in self.derived if not pair.is_recorded]
        return bool(self.leaves or derived) or self.faults.differ or made_of_others


def compare(left: Snapshot, right: Snapshot) -> Comparison:
    """Compare two configurations.

    Args:
        left: A, the side that the other is held against.
    """
    return Comparison(
        left=left,
        right=right,
        choices=tuple(_choices(left, right)),
        leaves=tuple(_leaves(left, right)),
        derived=tuple(_derived(left.derived, right.derived)),
        faults=_sentences(left.faults, right.faults),
        warnings=_sentences(left.warnings, right.warnings),
        circumstances=tuple(_circumstances(left.circumstances, right.circumstances)),
        metrics=compare_metrics(left.metrics, right.metrics),
        hand_off=hand_off(left, right),
    )


def _choices(left: Snapshot, right: Snapshot) -> Iterable[ChoicePair]:
    if not left.choices or not right.choices:
        return  # not known of one side
    for group in _merged_order(list(left.choices), list(right.choices)):
        mine, other = left.choices.get(group), right.choices.get(group)
        if mine != other:
            yield ChoicePair(
                group=group,
                left=mine,
                right=other,
                left_origins=left.choosers.get(group, ()),
                right_origins=right.choosers.get(group, ()),
            )


def _leaves(left: Snapshot, right: Snapshot) -> Iterable[LeafPair]:
    if not left.leaves or not right.leaves:
        return  # one does not compose at all
    for key in _merged_order(list(left.leaves), list(right.leaves)):
        mine, other = left.leaves.get(key), right.leaves.get(key)
        if mine is not None and other is not None:
            # Where one side has it resolved and the other cannot, what both wrote is compared.
            is_half = _is_open(key, mine, left) != _is_open(key, other, right)
            one, another = (written(mine), written(other)) if is_half else (mine, other)
            if not _is_same(one.value, another.value):
                yield LeafPair(key=key, left=mine, right=other)
        elif mine is not None and not _is_empty_node(mine, key, right.leaves):
            yield LeafPair(key=key, left=mine, right=None)
        elif other is not None and not _is_empty_node(other, key, left.leaves):
            yield LeafPair(key=key, left=None, right=other)


def _is_open(key: str, leaf: Leaf, snapshot: Snapshot) -> bool:
    """Whether an automatic value is as it was written: sizes with faults leave it so."""
    return bool(snapshot.faults) and key in AUTOMATIC_KEYS and leaf.value in UNRESOLVED


def written(leaf: Leaf) -> Leaf:
    """The leaf before an automatic value took its place."""
    if len(leaf.origins) > 1 and leaf.origins[-1].kind == AUTOMATIC:
        return Leaf(value=leaf.origins[-2].value, origins=leaf.origins[:-1])
    return leaf


def _is_empty_node(leaf: Leaf, key: str, others: Mapping[str, Leaf]) -> bool:
    """Whether `leaf` is a dictionary without entries, where the other side has entries."""
    return bool(leaf.value == {}) and any(other.startswith(f"{key}.") for other in others)


def _derived(left: Sequence[Derived], right: Sequence[Derived]) -> Iterable[DerivedPair]:
    if not left or not right:
        return
    mine = {one.name: one for one in left}
    others = {one.name: one for one in right}
    # What is missing is then not known, rather than none.
    is_known = _knows_model(mine) and _knows_model(others)
    for name in _merged_order(list(mine), list(others)):
        one, other = mine.get(name), others.get(name)
        if is_group(name):
            is_same = _joined(one) == _joined(other)
        elif one is None or other is None:
            is_same = not is_known
        else:
            is_same = _is_same(one.value, other.value) and share_text(one) == share_text(other)
        if not is_same:
            yield DerivedPair(name=name, left=one, right=other)


def _knows_model(derived: Mapping[str, Derived]) -> bool:
    return any(f".{name}".endswith(MODEL_SIZE) for name in derived)


def is_group(name: str) -> bool:
    """Whether a derived value of this name says which ranks work together."""
    return "groups" in name.split(".")[:-1]


def _joined(one: Derived | None) -> list[Any]:
    """The groups of more than one rank: ranks that are alone are so without a group, too."""
    groups = [] if one is None else one.value
    return [ranks for ranks in groups if len(ranks) > 1]


def _circumstances(left: Mapping[str, str], right: Mapping[str, str]) -> Iterable[CircumstancePair]:
    kinds = {name.partition(" ")[0] for name in left} & {name.partition(" ")[0] for name in right}
    for name in _merged_order(list(left), list(right)):
        mine, other = left.get(name), right.get(name)
        if mine != other and name.partition(" ")[0] in kinds:
            yield CircumstancePair(name=name, left=mine, right=other)


def _sentences(left: Sequence[str], right: Sequence[str]) -> Sentences:
    """By their words: how they are broken into lines means nothing."""
    mine, others = {_words(text) for text in left}, {_words(text) for text in right}
    return Sentences(
        left=tuple(text for text in left if _words(text) not in others),
        right=tuple(text for text in right if _words(text) not in mine),
        both=tuple(text for text in left if _words(text) in others),
    )


def _words(text: str) -> str:
    return " ".join(text.split())


def _is_same(left: Any, right: Any) -> bool:
    """Equal values of equal kinds: 1 is no true, but 1 is 1.0."""
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _merged_order(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Names of both in an order that keeps neighbours together.

    A name that only `right` has follows the name that it follows there.
    """
    merged, known = list(left), set(left)
    place = 0
    for name in right:
        if name in known:
            place = merged.index(name) + 1
        else:
            merged.insert(place, name)
            place += 1
    return merged
