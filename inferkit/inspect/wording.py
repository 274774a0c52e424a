"""How values, origins and derived values are written for people."""

from typing import Any

from inferkit.config.faults import show
from inferkit.config.origins import AUTOMATIC, CLUSTER, COMMAND_LINE, SCHEMA
from inferkit.inspect.snapshot import Derived, Leaf, Origin

BYTES = "bytes"
AT_MOST = "at most"
COUNTED = ("heads", "experts")
"""Units of which a rank may have a part of each, or each on several ranks."""


def value_text(value: Any) -> str:
    """As on the command line; an empty text in quotes, so that it is seen."""
    return "''" if value == "" else show(value)


def derived_text(one: Derived) -> str:
    """`34,747 MiB`, `{0-7} {8-15}`, `256`, `at most 25`."""
    text = one.text or exact_text(one)
    return f"{AT_MOST} {text}" if one.is_at_most else text


def exact_text(one: Derived) -> str:
    """A number with every digit: `983,040 bytes`, `256`; anything else as its text."""
    if not isinstance(one.value, int) or isinstance(one.value, bool):
        return one.text or value_text(one.value)
    return f"{one.value:,} {BYTES}" if one.unit == BYTES else f"{one.value:,}"


def origin_text(origin: Origin) -> str:
    """Who it is, and where: `+role=decode, conf/role/decode.yaml:11`."""
    if origin.kind == SCHEMA:
        return f"default, {origin.place}"
    if origin.kind in (COMMAND_LINE, AUTOMATIC, CLUSTER):
        return f"{origin.kind}, {origin.text}" if origin.text else origin.kind
    if origin.kind == "primary" or not origin.text:
        return origin.place or origin.kind
    return f"{origin.text}, {origin.place}" if origin.place else origin.text


def short_origin(leaf: Leaf) -> str:
    """Of the one who won, and of those overridden beside the schema; empty = not known."""
    if not leaf.origins:
        return ""
    last, *others = reversed(leaf.origins)
    over = [_short(origin) for origin in others if origin.kind != SCHEMA]
    return _short(last) + (f", over {', '.join(over)}" if over else "")


def _short(origin: Origin) -> str:
    if origin.kind == SCHEMA:
        return "default"
    return origin.place or origin.kind


def size_text(num_bytes: int) -> str:
    """`819,200 bytes`, `2.8 MiB`, `34,747 MiB`."""
    if num_bytes < 2**20:
        return f"{num_bytes:,} bytes"
    size = num_bytes / 2**20
    return f"{size:.1f} MiB" if size < 100 else f"{size:,.0f} MiB"


def share_text(one: Derived) -> str:
    """What is said of a count beside the number: `1/16 of each`, `each on 4 ranks`; mostly ''."""
    return one.text.partition(", ")[2] if one.unit in COUNTED else ""
