"""A comparison as markdown, for the description of a change or a review."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from inferkit.inspect.diff.compare import Comparison, Sentences
from inferkit.inspect.diff.wording import (
    chooser,
    derived_texts,
    group_rows,
    hand_off_title,
    leaf_rows,
    leaf_text,
    notes,
    number_text,
    reason,
    size_ratio,
    titles,
    verdict,
    verdict_text,
)


def as_markdown(comparison: Comparison) -> str:
    """Only what differs, a table for each section."""
    blocks = [
        ["**Configuration**", "", *(f"- {a}: {_code(title)}" for a, title in titles(comparison))]
    ]
    if comparison.hand_off is not None:
        blocks.append(list(_hand_off(comparison)))
    blocks += [
        _table(["group", "A", "B", "chosen by"], _choices(comparison)),
        _table(["key", "A", "B", "set by"], _leaves(comparison)),
        _table(["derived value", "A", "B", ""], _derived(comparison)),
        _table(["groups of ranks", "A", "B", ""], _groups(comparison)),
        _sentences("Rules broken", comparison.faults),
        _sentences("Warnings", replace(comparison.warnings, both=())),
        _table(["made with", "A", "B", ""], _circumstances(comparison)),
        _table(["metric (one run each)", "A", "B", "B against A"], _metrics(comparison)),
        _list("Notes", notes(comparison)),
    ]
    if verdict(comparison):
        blocks.append([f"**{verdict(comparison).capitalize()}.**"])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _hand_off(comparison: Comparison) -> Iterator[str]:
    found = comparison.hand_off
    assert found is not None, "only prefill and decode have a hand-off"
    yield f"**Hand-off {hand_off_title(comparison)}** {_codes(found.different)}".rstrip()
    yield ""
    yield f"Equal, as must be: {_codes(found.equal)}"


def _codes(keys: Sequence[str]) -> str:
    return ", ".join(map(_code, keys))


def _choices(comparison: Comparison) -> Iterator[list[str]]:
    for pair in comparison.choices:
        sides = (_code(option) if option else "" for option in (pair.left, pair.right))
        yield [_code(pair.group), *sides, _code(chooser(pair))]


def _leaves(comparison: Comparison) -> Iterator[list[str]]:
    refused = comparison.hand_off.different if comparison.hand_off is not None else ()
    for pair in leaf_rows(comparison):
        key = _code(pair.key)
        if pair.key in refused:
            key += " **must be equal**"
        values = (_code(leaf_text(leaf)) if leaf else "" for leaf in (pair.left, pair.right))
        yield [key, *values, _code(reason(pair))]


def _derived(comparison: Comparison) -> Iterator[list[str]]:
    for pair in comparison.derived:
        if pair.is_group:
            continue
        yield [_code(pair.name), *derived_texts(pair), size_ratio(pair)]


def _groups(comparison: Comparison) -> Iterator[list[str]]:
    for ranks, names in group_rows(comparison).items():
        yield [_codes(names), *map(_code, ranks), ""]


def _circumstances(comparison: Comparison) -> Iterator[list[str]]:
    for pair in comparison.circumstances:
        yield [_escaped(pair.name), *(_escaped(side or "") for side in (pair.left, pair.right)), ""]


def _metrics(comparison: Comparison) -> Iterator[list[str]]:
    for pair in comparison.metrics:
        if not pair.is_detail:
            values = (number_text(pair.left), number_text(pair.right))
            yield [_code(pair.name), *values, verdict_text(pair)]


def _sentences(title: str, found: Sentences) -> list[str]:
    sides = (("A", found.left), ("B", found.right), ("A and B", found.both))
    return _list(title, [f"{letter}: {text}" for letter, texts in sides for text in texts])


def _list(title: str, texts: Sequence[str]) -> list[str]:
    lines = [f"- {'<br>'.join(map(_escaped, text.splitlines()))}" for text in texts]
    return [f"**{title}**", "", *lines] if lines else []


def _table(heads: Sequence[str], rows: Iterator[list[str]]) -> list[str]:
    found = list(rows)
    if not found:
        return []
    if not any(row[-1] for row in found):  # nobody has a remark
        heads, found = heads[:-1], [row[:-1] for row in found]
    lines = [heads, ["---"] * len(heads), *found]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _code(text: str) -> str:
    """As code, whatever is in it: more backticks around it than it has, no bars, one line."""
    text = " ".join(text.split()).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def _escaped(text: str) -> str:
    """Text without the signs that mean something in markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", text)
