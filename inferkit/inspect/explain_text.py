"""Explanations of a snapshot as text for a terminal."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from inferkit.config.grid import SWEEP
from inferkit.config.origins import ADDED, COMMAND_LINE
from inferkit.config.reference import key_texts
from inferkit.inspect.snapshot import Derived, Leaf, Origin, Snapshot
from inferkit.inspect.wording import (
    BYTES,
    derived_text,
    exact_text,
    origin_text,
    short_origin,
    value_text,
)

LINE_LENGTH = 100
CANNOT_RUN = "cannot run (`inferkit check` with these words shows a command that works)"
RECORDED_CANNOT_RUN = "cannot run here as it is"
"""Of a run directory or a file, which are no words of a command."""
VALUE_LENGTH = 44
"""A longer value is cut in a table; `explain KEY` shows it whole."""

Row = tuple[str, str, str]


def explain_all(snapshot: Snapshot, *, cannot_run: str = CANNOT_RUN) -> str:
    """Every group, key and derived value in a line of its own.

    Args:
        cannot_run: title of the faults.
    """
    keys = [line for rows in _by_node(snapshot) for line in (*_table(rows), "")][:-1]
    return _sections(
        ("group choices", _table(_choice_rows(snapshot, snapshot.choices))),
        ("keys", keys),
        ("what follows", _derived_lines(snapshot.derived)),
        (cannot_run, _sentences(snapshot.faults)),
        ("warnings", _sentences(snapshot.warnings)),
        ("notes", _sentences(snapshot.notes)),
    )


def explain_some(snapshot: Snapshot, keys: Sequence[str], *, cannot_run: str = CANNOT_RUN) -> str:
    """What is known of each of `keys`, which are keys, nodes, groups or derived values."""
    found = ["\n".join(_explain(snapshot, key)) for key in dict.fromkeys(keys)]
    faults = _sections((cannot_run, _sentences(snapshot.faults)))
    return "\n\n".join(block for block in [*found, faults] if block)


def _sections(*sections: tuple[str, Iterable[str]]) -> str:
    """Titles with their lines, those without lines left out."""
    found = [(title, list(lines)) for title, lines in sections]
    return "\n\n".join("\n".join([title, *lines]) for title, lines in found if lines)


def _explain(snapshot: Snapshot, key: str) -> Iterator[str]:
    below = _below(snapshot, key)
    choice, leaf = snapshot.choices.get(key), snapshot.leaves.get(key)
    if key in snapshot.choices:
        axes = snapshot.axes if key == SWEEP else {}
        what = "keys" if below else "axes"
        told = f"the {what} that it sets are below" if below or axes else "it sets no key"
        yield f"{key} = {choice}  (a group; {told})"
        yield from _meaning(key)
        yield from _origin_lines(snapshot.choosers.get(key, ()), choice)
        yield from _axis(snapshot, key)
        yield from _table((name, values, "") for name, values in axes.items())
    if leaf is not None and (key not in snapshot.choices or leaf.value not in ({}, choice)):
        yield from _explain_leaf(snapshot, key, leaf)
    for one in snapshot.derived:
        if one.name == key:
            yield from _explain_derived(snapshot, one)
    yield from _table(_leaf_rows(below))
    yield from _derived_lines(one for one in snapshot.derived if one.name.startswith(f"{key}."))


def _below(snapshot: Snapshot, key: str) -> dict[str, Leaf]:
    """Leaves of a node or a group; of a group whose options set keys of any node, those keys."""
    if key in snapshot.choices and key in ADDED:
        option = f"{key}={snapshot.choices[key]}"
        return {
            name: leaf
            for name, leaf in snapshot.leaves.items()
            if any(one.kind == key and one.text.lstrip("+") == option for one in leaf.origins)
        }
    node = key.replace("/", ".") if key in snapshot.choices else key
    return {
        name: leaf
        for name, leaf in snapshot.leaves.items()
        if name.startswith(f"{node}.") or (name == node != key)
    }


def _axis(snapshot: Snapshot, key: str) -> list[str]:
    """That a sweep gives the key other values than the one that is shown."""
    values = snapshot.axes.get(key)
    if values is None:
        return []
    text = f"{values}: each cell of the sweep has one of these; the value above is without it"
    return _wrapped(text, "  swept as    ", " " * 14)


def _explain_leaf(snapshot: Snapshot, key: str, leaf: Leaf) -> Iterator[str]:
    yield from _wrapped(f"{key} = {value_text(leaf.value)}", "", "    ")
    yield from _meaning(key)
    if not leaf.origins:
        yield "  set by      not recorded"
    yield from _origin_lines(leaf.origins, leaf.value)
    yield from _axis(snapshot, key)
    yield from _uses(snapshot, key)


def _meaning(key: str) -> list[str]:
    return _wrapped(key_texts().get(key, ""), "  ", "  ")


def _origin_lines(origins: Sequence[Origin], value: object) -> Iterator[str]:
    """The one who won, then those that it has overridden, the latest first."""
    if not origins:
        return
    last, *others = reversed(origins)
    is_told = last.value == value or last.kind == COMMAND_LINE
    written = "" if is_told else f", written as {value_text(last.value)}"
    yield from _wrapped(f"{origin_text(last)}{written}", "  set by      ", " " * 14)
    width = max((len(_cut(value_text(origin.value))) for origin in others), default=0)
    for origin in others:
        first = f"  instead of  {_cut(value_text(origin.value)):<{width}}  "
        yield from _wrapped(origin_text(origin), first, " " * len(first))


def _explain_derived(snapshot: Snapshot, one: Derived) -> Iterator[str]:
    text = derived_text(one)
    exact = f" ({exact_text(one)})" if one.unit == BYTES and exact_text(one) not in text else ""
    yield from _wrapped(f"{one.name} = {text}{exact}", "", "    ")
    yield from _wrapped(one.formula, "  derived     ", " " * 14)
    yield from _uses(snapshot, one.name)


def _uses(snapshot: Snapshot, name: str) -> Iterator[str]:
    """Derived values whose formula has it, by its whole name or by a last part like no word."""
    side, last = name.split(".")[0], name.rpartition(".")[2]
    named = "|".join(map(re.escape, [name, last] if "_" in last else [name]))
    word = re.compile(rf"(?<![\w.])({named})(?![\w.])")
    found = [
        one.name
        for one in snapshot.derived
        if one.name != name and word.search(one.formula) and _is_same_side(side, one.name)
    ]
    if found:
        yield from _wrapped(", ".join(found), "  used by     ", " " * 14)


def _is_same_side(side: str, name: str) -> bool:
    """Derived values of a cluster's prefill follow from others of prefill."""
    return side not in ("prefill", "decode") or name.startswith(f"{side}.")


def _choice_rows(snapshot: Snapshot, groups: Iterable[str]) -> Iterator[Row]:
    for group in groups:
        leaf = Leaf(value=snapshot.choices[group], origins=snapshot.choosers.get(group, ()))
        yield group, value_text(leaf.value), short_origin(leaf)


def _by_node(snapshot: Snapshot) -> Iterator[list[Row]]:
    """Rows of leaves, those of one node together."""
    nodes: dict[str, dict[str, Leaf]] = {}
    for key, leaf in snapshot.leaves.items():
        nodes.setdefault(key.split(".")[0] if "." in key else "", {})[key] = leaf
    yield from (list(_leaf_rows(leaves)) for leaves in nodes.values())


def _leaf_rows(leaves: dict[str, Leaf]) -> Iterator[Row]:
    for key, leaf in leaves.items():
        yield key, _cut(value_text(leaf.value)), short_origin(leaf)


def _table(rows: Iterable[Row]) -> Iterator[str]:
    found = list(rows)
    widths = [max((len(row[column]) for row in found), default=0) for column in (0, 1)]
    for name, value, origin in found:
        yield f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {origin}".rstrip()


def _derived_lines(found: Iterable[Derived]) -> Iterator[str]:
    rows = [(one.name, derived_text(one), f"= {one.formula}") for one in found]
    name_width = max((len(name) for name, _, _ in rows), default=0)
    value_width = max((len(value) for _, value, _ in rows if len(value) <= 20), default=0)
    for name, value, formula in rows:
        start = f"  {name:<{name_width}}  {value:<{value_width}}  "
        if len(start) + len(formula) <= LINE_LENGTH:
            yield start + formula
        else:
            yield from _wrapped(value, f"  {name:<{name_width}}  ", " " * (name_width + 4))
            yield from _wrapped(formula, " " * (name_width + 4), " " * (name_width + 6))


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        first, *others = text.splitlines()
        yield from _wrapped(first, "  ", "      ")
        for line in others:
            yield from _wrapped(line.strip(), "      ", "      ")


def _cut(text: str) -> str:
    return text if len(text) <= VALUE_LENGTH else f"{text[: VALUE_LENGTH - 3]}..."


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        LINE_LENGTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
