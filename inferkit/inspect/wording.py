"""How values, origins and derived values are written for people."""

from typing import Any

from inferkit.config.faults import show
from inferkit.config.origins import AUTOMATIC, COMMAND_LINE, SCHEMA
from inferkit.inspect.snapshot import Derived, Leaf, Origin

BYTES = "bytes"


def value_text(value: Any) -> str:
    """As on the command line; an empty text in quotes, so that it is seen."""
    return "''" if value == "" else show(value)


def derived_text(one: Derived) -> str:
    """`34,747 MiB`, `{0-7} {8-15}`, `256`."""
    if one.text:
        return one.text
    is_number = isinstance(one.value, int) and not isinstance(one.value, bool)
    number = f"{one.value:,}" if is_number else value_text(one.value)
    return f"{number} {BYTES}" if one.unit == BYTES else number


def origin_text(origin: Origin) -> str:
    """Who it is, and where: `+role=decode, conf/role/decode.yaml:11`."""
    if origin.kind == SCHEMA:
        return f"default, {origin.place}"
    if origin.kind in (COMMAND_LINE, AUTOMATIC):
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
