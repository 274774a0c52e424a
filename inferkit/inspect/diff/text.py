"""A comparison as text for a terminal."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from inferkit.inspect.diff.compare import Comparison, LeafPair, Sentences
from inferkit.inspect.diff.wording import (
    ARROW,
    NONE,
    chooser,
    derived_texts,
    group_rows,
    hand_off_title,
    leaf_rows,
    leaf_text,
    notes,
    number_text,
    origin_text,
    reason,
    size_ratio,
    titles,
    verdict,
    verdict_text,
)

LINE_LENGTH = 100


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a section; with what is too long for one, several."""

    name: str
    left: str
    right: str
    remark: str = ""
    """At the end of the line."""
    left_remark: str = ""
    right_remark: str = ""
    """In place of `remark`, where each side has a line of its own."""
    mark: str = " "

    @property
    def values(self) -> str:
        return f"{self.left} {ARROW} {self.right}" if self.mark not in "+-" else self._only

    @property
    def _only(self) -> str:
        return self.right if self.mark == "+" else self.left

    def in_lines(self) -> Iterator[str]:
        """The form of a row that is too long."""
        yield f"{self.mark} {self.name}"
        sides = [("A", self.left, self.left_remark), ("B", self.right, self.right_remark)]
        if self.mark in "+-":
            sides = sides[1:] if self.mark == "+" else sides[:1]
        width = max(len(value) for _, value, _ in sides)
        for letter, value, remark in sides:
            line = f"      {letter}  {value:<{width}}  {remark}".rstrip()
            if len(line) <= LINE_LENGTH or not remark:
                yield line
            else:
                yield f"      {letter}  {value}"
                yield f"           {remark}"


def as_text(comparison: Comparison) -> str:
    """Only what differs, section by section."""
    lines = [f"{letter}  {title}" for letter, title in titles(comparison)]
    lines += _hand_off(comparison)
    sections = (
        ("group choices", _table(_choices(comparison))),
        ("keys", _table(_leaves(comparison))),
        ("what follows", _table(_derived(comparison))),
        ("groups of ranks", _groups(comparison)),
        ("rules broken", _sentences(comparison.faults)),
        ("warnings", _sentences(replace(comparison.warnings, both=()))),
        ("made with", _table(_circumstances(comparison))),
        ("metrics of one run each", _table(_metrics(comparison))),
        ("notes", [line for text in notes(comparison) for line in _wrapped(text, "  ", "    ")]),
    )
    for title, found in sections:
        content = list(found)
        if content:
            lines += ["", title, *content]
    if verdict(comparison):
        lines += ["", verdict(comparison)]
    return "\n".join(lines)


def _hand_off(comparison: Comparison) -> list[str]:
    found = comparison.hand_off
    if found is None:
        return []
    title = f"hand-off {hand_off_title(comparison)} {', '.join(found.different)}"
    equal = f"equal, as must be: {', '.join(found.equal)}"
    return ["", *_wrapped(title, "", "  "), *_wrapped(equal, "  ", "  ")]


def _choices(comparison: Comparison) -> Iterator[Row]:
    for pair in comparison.choices:
        yield Row(
            name=pair.group,
            left=pair.left or NONE,
            right=pair.right or NONE,
            remark=chooser(pair),
        )


def _leaves(comparison: Comparison) -> Iterator[Row]:
    refused = comparison.hand_off.different if comparison.hand_off is not None else ()
    for pair in leaf_rows(comparison):
        yield Row(
            name=pair.key,
            left=leaf_text(pair.left),
            right=leaf_text(pair.right),
            remark=reason(pair),
            left_remark=origin_text(pair.left),
            right_remark=origin_text(pair.right),
            mark="!" if pair.key in refused else _mark(pair),
        )


def _mark(pair: LeafPair) -> str:
    if pair.left is None:
        return "+"
    return "-" if pair.right is None else " "


def _derived(comparison: Comparison) -> Iterator[Row]:
    for pair in comparison.derived:
        if pair.is_group:
            continue
        left, right = derived_texts(pair)
        yield Row(name=pair.name, left=left, right=right, remark=size_ratio(pair))


def _groups(comparison: Comparison) -> Iterator[str]:
    """Names of groups that differ alike, then how."""
    for (left, right), names in group_rows(comparison).items():
        yield from _wrapped(", ".join(names), "  ", "  ")
        line = f"      {left} {ARROW} {right}"
        yield from [line] if len(line) <= LINE_LENGTH else [f"      A  {left}", f"      B  {right}"]


def _circumstances(comparison: Comparison) -> Iterator[Row]:
    for pair in comparison.circumstances:
        yield Row(name=pair.name, left=pair.left or NONE, right=pair.right or NONE)


def _metrics(comparison: Comparison) -> Iterator[Row]:
    for pair in comparison.metrics:
        if not pair.is_detail:
            yield Row(
                name=pair.name,
                left=number_text(pair.left),
                right=number_text(pair.right),
                remark=verdict_text(pair),
            )


def _sentences(found: Sentences) -> Iterator[str]:
    for letter, texts in (("A", found.left), ("B", found.right), ("A and B", found.both)):
        for text in texts:
            first, *others = text.splitlines()
            yield from _wrapped(f"{letter}: {first}", "  ", "      ")
            for line in others:
                yield from _wrapped(line, "      ", "      ")


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text,
        LINE_LENGTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(rows: Iterator[Row]) -> Iterator[str]:
    """Names, values and remarks in columns; a row that does not fit takes several lines."""
    found = list(rows)
    name_width = max((len(row.name) for row in found), default=0)
    room = LINE_LENGTH - name_width - 4
    value_width = _value_width(found, room)
    for row in found:
        line = f"{row.mark} {row.name:<{name_width}}  {row.values:<{value_width}}  {row.remark}"
        short = f"{row.mark} {row.name}  {row.values}  {row.remark}"
        if len(line.rstrip()) <= LINE_LENGTH:
            yield line.rstrip()
        elif len(short) <= LINE_LENGTH:
            yield short
        else:
            yield from row.in_lines()


def _value_width(rows: Sequence[Row], room: int) -> int:
    """So that most remarks stand below each other; rows that would be too long do without."""
    remarked = [row for row in rows if row.remark]

    def num_fitting(width: int) -> int:
        return sum(len(row.values) <= width <= room - 2 - len(row.remark) for row in remarked)

    widths = {len(row.values) for row in remarked}
    return max(sorted(widths), key=num_fitting, default=0)
