"""Names and types of the configuration's keys, and which key was probably meant."""

import difflib
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf

MAX_SUGGESTIONS = 3
SAME_WORD = 0.75
"""Similarity above which a word is taken for a misspelling of another."""
SOMEWHAT = 0.5
"""The last part of a key must be so similar, however much the nodes are."""


@dataclass(frozen=True, kw_only=True)
class KeyInfo:
    """Where a dotted key leads in a composed configuration."""

    parent: str
    """The deepest node on the way that exists."""
    siblings: tuple[str, ...]
    """Keys of that node."""
    hint: Any = None
    """Type of the key; None where it is unknown."""
    is_free: bool = False
    """The key lies in a free-form dictionary."""

    @property
    def is_known(self) -> bool:
        return self.is_free or self.hint is not None


def find_key(cfg: DictConfig, key: str) -> KeyInfo:
    """Follow `key` through the typed nodes of `cfg`."""
    node: Any = cfg
    parent: list[str] = []
    parts = key.split(".")
    for position, part in enumerate(parts):
        hints = type_hints(node)
        if isinstance(node, DictConfig) and part in node:
            # A plugin's option may have keys that the type of its node has not.
            hints = {part: Any} | hints
        if part not in hints:
            return KeyInfo(parent=".".join(parent), siblings=tuple(hints))
        hint = hints[part]
        if position == len(parts) - 1:
            return KeyInfo(parent=".".join(parent), siblings=tuple(hints), hint=hint)
        if is_dictionary(hint):
            return KeyInfo(parent=".".join(parent), siblings=tuple(hints), is_free=True)
        parent.append(part)
        node = node._get_node(part) if isinstance(node, DictConfig) else None
    raise AssertionError("a key has at least one part")


def type_hints(node: Any) -> dict[str, Any]:
    """Field -> type of a typed node; of an untyped one, every key with the type Any."""
    if not isinstance(node, DictConfig):
        return {}
    cls = OmegaConf.get_type(node)
    if cls is not None and is_dataclass(cls):
        return typing.get_type_hints(cls)
    return {str(key): Any for key in node}


def is_dictionary(hint: Any) -> bool:
    return typing.get_origin(_without_none(hint)) is dict or hint is dict


def is_node(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def leaf_keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """Dotted names of all typed keys, nodes left out."""
    for name, hint in type_hints(cfg).items():
        if is_node(hint):
            child = cfg._get_node(name)
            if isinstance(child, DictConfig):
                yield from leaf_keys(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def similar_keys(key: str, known: list[str]) -> list[str]:
    """Known keys that `key` may stand for, the best first; empty where nothing is near.

    A key without its node (`batch_size`) or under a wrong one is found by its last part.
    """
    last = key.rpartition(".")[2].lower()
    known = [candidate for candidate in known if not key.startswith(f"{candidate}.")]
    if sum(name.rpartition(".")[2] == last for name in known) > MAX_SUGGESTIONS:
        return []  # a name that many nodes have (params) says nothing of which is meant
    scored = []
    for order, candidate in enumerate(known):
        whole = _ratio(key.lower(), candidate.lower())
        part = _ratio(last, re.split(r"[./]", candidate)[-1].lower())
        score = max(whole, part) if part >= SOMEWHAT or "." not in key else 0.0
        if score >= SAME_WORD:
            # A whole key that is near beats one whose last part alone is.
            scored.append((-round(score, 3), -whole if "." in key else 0.0, order, candidate))
    scored.sort()
    if not scored:
        return []
    best = scored[0][0]
    near = [entry[3] for entry in scored if entry[0] == best]
    is_unique = "." in key and len(scored) > 1 and scored[0][1] < scored[1][1]
    return near[: 1 if is_unique else MAX_SUGGESTIONS]


def describe_type(hint: Any) -> str:
    """What may be written for a key of this type."""
    inner = _without_none(hint)
    null = "" if inner is hint else " or null"
    if isinstance(inner, type) and issubclass(inner, Enum):
        return "one of " + ", ".join(inner.__members__) + null
    if is_node(inner):
        keys = [name for name in typing.get_type_hints(inner) if name != "_target_"]
        return "set through one of its keys: " + ", ".join(keys)
    origin = typing.get_origin(inner)
    if origin is list:
        example = "1,2" if typing.get_args(inner) == (int,) else "a,b"
        return f"a list such as '[{example}]'" + null
    if origin is dict:
        return "a dictionary such as '{a:1}'" + null
    words = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        Any: "of another type",
    }
    return words.get(inner, str(inner)) + null


def enum_members(hint: Any) -> list[str]:
    inner = _without_none(hint)
    if isinstance(inner, type) and issubclass(inner, Enum):
        return list(inner.__members__)
    return []


def accepts_integer(hint: Any) -> bool:
    return _without_none(hint) is int


def is_text(hint: Any) -> bool:
    """Whether any text is a value; Any, of an untyped node, is taken for it too."""
    return _without_none(hint) in (str, Any)


def list_item_type(hint: Any) -> Any:
    """`list[str]` -> str; None where it is no list."""
    inner = _without_none(hint)
    return typing.get_args(inner)[0] if typing.get_origin(inner) is list else None


def _without_none(hint: Any) -> Any:
    """`int | None` -> `int`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return hint


def _ratio(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()
