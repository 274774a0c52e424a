"""A comparison as plain data, with everything that is known of either side."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from inferkit.inspect.diff.compare import Comparison, Sentences
from inferkit.inspect.snapshot import Derived, Leaf, Origin, Snapshot

DIFF_VERSION = 1


def as_json(comparison: Comparison) -> str:
    """Text of one JSON object; sides are "a" and "b", null = a side does not have it."""
    return json.dumps(to_data(comparison), indent=2, ensure_ascii=False)


def to_data(comparison: Comparison) -> dict[str, Any]:
    """The object that `as_json` writes."""
    refused = comparison.hand_off.different if comparison.hand_off is not None else ()
    return {
        "version": DIFF_VERSION,
        "same": not comparison.has_effect,
        "a": _side(comparison.left),
        "b": _side(comparison.right),
        "choices": [
            {
                "group": pair.group,
                "a": _choice(pair.left, pair.left_origins),
                "b": _choice(pair.right, pair.right_origins),
            }
            for pair in comparison.choices
        ],
        "keys": [
            {
                "key": pair.key,
                "a": _leaf(pair.left),
                "b": _leaf(pair.right),
                "prevents_hand_off": pair.key in refused,
            }
            for pair in comparison.leaves
        ],
        "derived": [
            {"name": pair.name, "a": _derived(pair.left), "b": _derived(pair.right)}
            for pair in comparison.derived
        ],
        "faults": _sentences(comparison.faults),
        "warnings": _sentences(comparison.warnings),
        "made_with": [
            {"name": pair.name, "a": pair.left, "b": pair.right}
            for pair in comparison.circumstances
        ],
        "metrics": [
            {
                "name": pair.name,
                "a": pair.left,
                "b": pair.right,
                "ratio": pair.ratio,
                "verdict": pair.verdict or None,
            }
            for pair in comparison.metrics
        ],
        "hand_off": _hand_off(comparison),
    }


def _side(snapshot: Snapshot) -> dict[str, Any]:
    return {"title": snapshot.title, "role": snapshot.role, "notes": list(snapshot.notes)}


def _choice(option: str | None, origins: Sequence[Origin]) -> dict[str, Any] | None:
    if option is None:
        return None
    return {"option": option, "origins": [asdict(origin) for origin in origins]}


def _leaf(leaf: Leaf | None) -> dict[str, Any] | None:
    return None if leaf is None else asdict(leaf)


def _derived(one: Derived | None) -> dict[str, Any] | None:
    if one is None:
        return None
    data = asdict(one)
    del data["name"]
    return data


def _sentences(found: Sentences) -> dict[str, Sequence[str]]:
    return {"a": list(found.left), "b": list(found.right), "both": list(found.both)}


def _hand_off(comparison: Comparison) -> dict[str, Any] | None:
    found = comparison.hand_off
    if found is None:
        return None
    return {
        "possible": found.is_possible,
        "equal": list(found.equal),
        "different": list(found.different),
    }
