"""Snapshots made by hand: no configuration is composed."""

from collections.abc import Mapping
from typing import Any

from inferkit.inspect.snapshot import Derived, Leaf, Origin, Snapshot


def leaf(value: Any, place: str = "") -> Leaf:
    """A leaf that `file:line` has set; "" = nobody knows who, "default" = the schema."""
    if not place:
        return Leaf(value=value)
    if place == "default":
        return Leaf(value=value, origins=(Origin(kind="schema", text="", value=value),))
    file, _, line = place.partition(":")
    kind = "option" if file else "command line"
    origin = Origin(kind=kind, text="x=y", value=value, file=file, line=int(line or 0))
    return Leaf(value=value, origins=(origin,))


def derived(name: str, value: Any, unit: str = "", text: str = "") -> Derived:
    return Derived(name=name, value=value, formula="a * b = 1 * 2", unit=unit, text=text)


def snapshot(
    title: str = "some", *, leaves: Mapping[str, Any] | None = None, **facts: Any
) -> Snapshot:
    """`leaves` are values, or Leaf."""
    found = {
        key: value if isinstance(value, Leaf) else leaf(value)
        for key, value in (leaves or {}).items()
    }
    return Snapshot(title=title, leaves=found, **facts)
