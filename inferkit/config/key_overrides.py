"""Overrides of single keys (`scheduler.batch_size=8`): applied, or named with what would do."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from inferkit.config.faults import (
    Fault,
    Fix,
    closest,
    did_you_mean,
    key_of,
    shell_quote,
    show,
)
from inferkit.config.keys import (
    KeyInfo,
    accepts_integer,
    describe_type,
    enum_members,
    find_key,
    is_dictionary,
    is_node,
    leaf_keys,
    list_item_type,
    similar_keys,
)
from inferkit.config.meant import NO_PIPELINE, as_bytes, derived_formula, is_pipeline, renamed
from inferkit.config.rules import RANGES
from inferkit.config.schema import DecodeSchedulerConfig, SchedulerConfig
from inferkit.config.space import ConfigSpace
from inferkit.config.stray_words import meant_options

SIMILAR_CHOICE = 0.5
"""Choices are few, so that less likeness than elsewhere tells which one is meant (fp16)."""
ALLOWED = {limits.key: limits for limits in RANGES}
DECODE_OVERRIDES = "cluster.decode_overrides"
DECODE_KEYS = frozenset(
    f"scheduler.{entry.name}"
    for entry in fields(DecodeSchedulerConfig)
    if entry.name not in {known.name for known in fields(SchedulerConfig)}
)
"""Keys that the scheduler of a decode role alone has."""


def key_fault(
    space: ConfigSpace, cfg: DictConfig, text: str, overrides: Sequence[str] = ()
) -> Fault | None:
    """Apply one override to `cfg`, or say why it cannot be.

    Args:
        overrides: the whole command line.
    """
    override = space.parse(text)
    key, value = override.key_or_group, override.value()
    info = _find(cfg, override)
    choice = _meant_choice(space, key, info, value)
    if choice is not None:
        problem = f"chooses an option of {choice.partition('=')[0].lstrip('+')}; write {choice}"
        return Fault(key=key, given=text, problem=problem, fix=Fix(add=(choice,), drop=(key,)))
    if not info.is_known:
        return _unknown_key(space, cfg, override, overrides)
    if is_node(info.hint) and isinstance(value, dict):
        fault = _unknown_entry(space, cfg, override)
        if fault is not None:
            return fault
    try:
        space.apply(text, cfg)
        return None
    except HydraException as error:
        fix = _without(text)
        is_entry = info.is_free or (is_dictionary(info.hint) and isinstance(value, dict))
        if is_entry and not text.startswith(("+", "~")):
            problem = "a new entry of a free-form dictionary is added with '+'"
            fix = Fix(add=(f"+{text}",))
        elif override.is_delete():
            problem = "a key always has a value; leave this out, and it is the default"
        elif override.is_add() and "An item is already at" in str(error):
            problem = "the key has a value already, which is replaced without '+'"
            fix = Fix(add=(text.lstrip("+"),))
        elif is_node(info.hint) and space.is_group(group := key.replace(".", "/")):
            problem = f"is a node of several keys; an option for all of them: {group}={value}"
            fix = Fix(add=(f"{group}={value}",), drop=(key,))
        elif info.hint is None:
            problem = f"does not fit: {str(error.__cause__ or error).splitlines()[0]}"
        else:
            return _type_fault(key, value, info.hint, text)
        return Fault(key=key, given=text, problem=problem, fix=fix)


def _meant_choice(space: ConfigSpace, key: str, info: KeyInfo, value: Any) -> str | None:
    """The option that a node, or its class, was set to: `disagg=prefill` -> `+role=prefill`."""
    if not isinstance(value, str) or not value:
        return None
    node, _, name = key.rpartition(".")
    group = node.replace(".", "/")
    if name == "_target_" and space.is_group(group) and value in space.options(group):
        return f"{group}={value}"
    options = meant_options(space, value) if is_node(info.hint) else ()
    return options[0] if len(options) == 1 else None


def _without(text: str) -> Fix:
    """The command without an override of which nobody can say what was meant."""
    return Fix(drop=(key_of(text),))


def _find(cfg: DictConfig, override: Override, key: str = "") -> KeyInfo:
    key = key or override.key_or_group
    if override.is_hydra_override():
        return find_key(cfg.hydra, key.removeprefix("hydra."))
    return find_key(cfg, key)


def _type_fault(key: str, value: Any, hint: Any, text: str) -> Fault:
    """The value is of another type; one that was probably meant replaces it."""
    told = closest(str(value), enum_members(hint), SIMILAR_CHOICE)
    used = None
    if list_item_type(hint) is not None and isinstance(value, str | int) and value != "":
        told = f"[{value}]"
    if accepts_integer(hint) and isinstance(value, float) and math.isfinite(value):
        used = str(int(value))
        told = used if value.is_integer() else None
    elif accepts_integer(hint) and (size := as_bytes(str(value))) is not None:
        told = str(size)
    used, limits = used or told, ALLOWED.get(key)
    if limits is not None and not used:
        used = show(limits.use)
    allowed = f"; allowed is {limits.text}" if limits is not None else ""
    meant = did_you_mean(told and shell_quote(f"{key}={told}"))
    return Fault(
        key=key,
        given=text,
        problem=f"must be {describe_type(hint)}{allowed}{meant}",
        fix=Fix(add=(f"{key}={used}",)) if used else _without(text),
    )


def _known_keys(space: ConfigSpace, cfg: DictConfig, override: Override, key: str) -> list[str]:
    if override.is_hydra_override():
        return [f"hydra.{name}" for name in leaf_keys(cfg.hydra)]
    return list(dict.fromkeys([*([] if "." in key else space.groups), *leaf_keys(cfg)]))


def _unknown_entry(space: ConfigSpace, cfg: DictConfig, override: Override) -> Fault | None:
    """The first unknown key of `node={key: value}`."""
    node, value, text = override.key_or_group, override.value(), override.input_line or ""
    assert isinstance(value, dict)
    entries = {str(name): item for name, item in value.items()}
    for name in entries:
        key = f"{node}.{name}"
        if _find(cfg, override, key).is_known:
            continue
        near = similar_keys(key, _known_keys(space, cfg, override, key))
        add = [f"{node}.{other}={show(item)}" for other, item in entries.items() if other != name]
        if near:
            add.append(f"{near[0]}={show(entries[name])}")
        problem = f"{key}: {_no_such_key(cfg, override, key, near)}"
        return Fault(key=key, given=text, problem=problem, fix=Fix(add=tuple(add), drop=(node,)))
    return None


def _unknown_key(
    space: ConfigSpace, cfg: DictConfig, override: Override, overrides: Sequence[str]
) -> Fault:
    text, key = override.input_line or "", override.key_or_group
    _, equals, value = text.partition("=")
    fault = _known_elsewhere(cfg, override, overrides)
    if fault is not None:
        return fault
    near = similar_keys(key, _known_keys(space, cfg, override, key))
    group = closest(key, [name for name in space.groups if value in space.options(name)])
    if group is not None:
        near = [group]  # its option is named too
    fix, told = _without(text), list(near)
    if near and equals:
        told = [_written(space, name, value) for name in near]
        fix = Fix(add=(told[0],), drop=(key,))
        told = [
            text if space.is_group(name) else name for name, text in zip(near, told, strict=True)
        ]
    return Fault(key=key, given=text, problem=_no_such_key(cfg, override, key, told), fix=fix)


def _written(space: ConfigSpace, name: str, value: str) -> str:
    sign = "+" if space.is_group(name) and name not in space.defaults else ""
    return f"{sign}{name}={value}"


def _no_such_key(cfg: DictConfig, override: Override, key: str, near: Sequence[str]) -> str:
    problem = "there is no such key"
    if near:
        return problem + did_you_mean(" or ".join(near))
    info = _find(cfg, override, key)
    where = info.parent or "the configuration"
    if override.is_hydra_override():
        where = f"hydra.{info.parent}" if info.parent else "hydra"
    return f"{problem}\nkeys of {where}: {', '.join(info.siblings)}"


def _known_elsewhere(cfg: DictConfig, override: Override, overrides: Sequence[str]) -> Fault | None:
    """Keys that are derived, that a role has, or that other programs call so."""
    text, key = override.input_line or "", override.key_or_group
    value = text.partition("=")[2]
    formula, meant = derived_formula(key), renamed(key, value)
    if override.is_hydra_override():
        return None
    if formula is not None:
        problem = f"there is no such key: it is derived, {formula}; set those"
        fix = _without(text)
        if key.endswith("attn_dp_size") and value.isdigit():
            problem += did_you_mean(f"parallel=dp{value}")
            fix = Fix(add=(f"parallel=dp{value}",), drop=(key,))
        return Fault(key=key, given=text, problem=problem, fix=fix)
    if key in DECODE_KEYS:
        return _decode_key(cfg, text, overrides)
    if is_pipeline(key):
        return Fault(key=key, given=text, problem=f"there is no such key: {NO_PIPELINE}",
                     fix=_without(text))  # fmt: skip
    if meant is not None:
        problem = f"there is no such key{did_you_mean(meant)}"
        fix = Fix(add=(meant,), drop=(key,)) if value else _without(text)
        return Fault(key=key, given=text, problem=problem, fix=fix)
    return None


def _decode_key(cfg: DictConfig, text: str, overrides: Sequence[str]) -> Fault:
    key, fix = key_of(text), _without(text)
    problem = "only the scheduler of +role=decode has this key"
    if cfg.role == "cluster":
        own = f'{DECODE_OVERRIDES}="{text.lstrip("+")}"'
        problem += f"; in a cluster, write {shell_quote(own)}"
        if not any(key_of(other) == DECODE_OVERRIDES for other in overrides):
            fix = Fix(add=(own,), drop=(key,))
    return Fault(key=key, given=text, problem=problem, fix=fix)
