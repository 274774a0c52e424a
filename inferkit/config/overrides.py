"""Composition that names every faulty override instead of stopping at the first."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from inferkit.config.faults import Fault, Fix, closest, did_you_mean, key_of, shell_quote
from inferkit.config.keys import (
    KeyInfo,
    accepts_integer,
    describe_type,
    enum_members,
    find_key,
    is_dictionary,
    is_node,
    leaf_keys,
    similar_keys,
)
from inferkit.config.parallel_rules import sizes_named
from inferkit.config.secrets import hydra_secret_faults
from inferkit.config.space import ConfigSpace

PARALLEL = "parallel"
SIMILAR_CHOICE = 0.5
"""Choices are few, so that less likeness than elsewhere tells which one is meant (fp16)."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """The configuration of all overrides that are right, and the faults of the others."""

    cfg: DictConfig
    """The job part; not shared."""
    hydra: DictConfig
    """Hydra's own part; must not be changed."""
    faults: tuple[Fault, ...]
    used: tuple[str, ...] = ()
    """The overrides that are right, in the order that was typed."""


def compose_checked(space: ConfigSpace, overrides: Sequence[str]) -> Composition:
    """Compose the overrides of one run (no sweep values)."""
    faults: dict[str, Fault] = {}
    groups: list[str] = []
    keys: list[str] = []
    for text in overrides:
        fault = syntax_fault(space, text) or _sweep_fault(space.parse(text))
        if fault is None and _is_group_choice(space, space.parse(text)):
            fault = _group_fault(space, space.parse(text), overrides)
            groups += [text] if fault is None else []
        elif fault is None:
            keys.append(text)
        if fault is not None:
            faults[text] = fault
    groups, found = _composable(space, groups)
    faults |= found
    cfg, full = space.compose_job(groups), space.compose(groups)
    if any(space.parse(text).is_hydra_override() for text in keys):
        full = copy.deepcopy(full)
    for text in keys:
        fault = _key_fault(space, full if space.parse(text).is_hydra_override() else cfg, text)
        if fault is not None:
            faults[text] = fault
    ordered = tuple(faults[text] for text in dict.fromkeys(overrides) if text in faults)
    if full is not space.compose(groups):
        ordered += tuple(hydra_secret_faults(full.hydra))
    used = tuple(text for text in overrides if text not in faults)
    return Composition(cfg=cfg, hydra=full.hydra, faults=ordered, used=used)


def syntax_fault(space: ConfigSpace, text: str) -> Fault | None:
    """A text that Hydra's grammar does not take, with the quoting that it would."""
    key, equals, value = text.partition("=")
    if not key.strip("+~"):
        problem = "no key before the '='; write KEY=VALUE"
        return Fault(key=text, problem=problem, fix=_without(text))
    if not equals and not text.startswith("~"):
        return Fault(key=key, problem=f"has no value; write {key}=VALUE", fix=_without(text))
    try:
        space.parse(text)
    except HydraException as error:
        quoted = f"{key}='{value}'"
        try:
            space.parse(quoted)
        except HydraException:
            problem = f"cannot be read as KEY=VALUE: {str(error).splitlines()[0]}"
            return Fault(key=key, given=text, problem=problem, fix=_without(text))
        return Fault(
            key=key,
            given=text,
            problem=f"the value needs quotes of its own: {shell_quote(quoted)}",
            fix=Fix(add=(quoted,)),
        )
    return None


def _without(text: str) -> Fix:
    """The command without an override of which nobody can say what was meant."""
    return Fix(drop=(key_of(text),))


def _sweep_fault(override: Override) -> Fault | None:
    if not override.is_sweep_override():
        return None
    text = override.input_line or ""
    key, _, value = text.partition("=")
    as_list = shell_quote(f"{key}=[{value}]")
    as_text = shell_quote(f"{key}='{value}'")
    return Fault(
        key=override.key_or_group,
        given=text,
        problem=f"several values need -m (one run per value); "
        f"a list is written {as_list}, a text with commas {as_text}",
        fix=Fix(flag="-m"),
    )


def _is_group_choice(space: ConfigSpace, override: Override) -> bool:
    if override.is_delete() and "." in override.key_or_group:
        return False
    return space.is_group(override.key_or_group)


def _group_fault(space: ConfigSpace, override: Override, overrides: Sequence[str]) -> Fault | None:
    group, text = override.key_or_group, override.input_line or ""
    has_default = group in space.defaults
    value = override.value()
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    options = space.options(group)
    plain = f"{group}={','.join(names)}"
    if override.package is not None:
        return Fault(key=group, given=text, problem=f"a group goes to its own place; write {plain}")
    if override.is_delete():
        return None
    unknown = [name for name in names if name not in options and name != "None"]
    sizes = sizes_named(unknown[0]) if unknown and group == PARALLEL else {}
    if sizes:
        return _unwritten_option(text, sizes, overrides)
    if unknown:
        sign = "" if has_default else "+"
        guess = closest(unknown[0], options)
        fix = _without(text) if has_default else None
        if guess:
            fix = Fix(add=(f"{sign}{group}={guess}",))
        return Fault(
            key=group,
            given=text,
            problem=f"there is no such option{did_you_mean(guess and f'{sign}{group}={guess}')}\n"
            f"options of {group}: {', '.join(options)}",
            fix=fix,
        )
    if has_default and (override.is_add() or override.is_force_add()):
        return Fault(
            key=group,
            given=text,
            problem=f"{group} has a default already, which an option replaces without '+'",
            fix=Fix(add=(plain,)),
        )
    if not has_default and not override.is_add():
        return Fault(
            key=group,
            given=text,
            problem=f"{group} has no default, so its options are added with one '+'",
            fix=Fix(add=(f"+{plain}",)),
        )
    return None


def _unwritten_option(text: str, sizes: Mapping[str, int], overrides: Sequence[str]) -> Fault:
    """A choice of sizes that has no file: what the file would hold is written in its place."""
    own = {key_of(other) for other in overrides}
    keys = {f"{PARALLEL}.{name}": size for name, size in sizes.items()}
    return Fault(
        key=PARALLEL,
        given=text,
        problem="there is no such option, for only common sizes are files; give the sizes: "
        + " ".join(f"{key}={size}" for key, size in keys.items()),
        fix=Fix(
            add=tuple(f"{key}={size}" for key, size in keys.items() if key not in own),
            drop=(PARALLEL,),
        ),
    )


def _composable(space: ConfigSpace, groups: list[str]) -> tuple[list[str], dict[str, Fault]]:
    """Group choices that compose together; the others as faults with Hydra's reason."""
    try:
        space.compose(groups)
        return groups, {}
    except HydraException:
        good: list[str] = []
        faults = {}
        for text in groups:
            try:
                space.compose([*good, text])
                good.append(text)
            except HydraException as error:
                key = space.parse(text).key_or_group
                faults[text] = Fault(key=key, given=text, problem=_reason(error))
        return good, faults


def _reason(error: HydraException) -> str:
    """What Hydra says, and the cause beneath it, without its advice to add keys with '+'."""
    parts = [str(error)] + ([str(error.__cause__)] if error.__cause__ else [])
    lines = [line.strip() for part in parts for line in part.splitlines()]
    internal = ("full_key:", "object_type=", "reference_type=", "To append to your config")
    return " ".join(line for line in lines if line and not line.startswith(internal))


def _key_fault(space: ConfigSpace, cfg: DictConfig, text: str) -> Fault | None:
    """Apply one override to `cfg`, or say why it cannot be."""
    override = space.parse(text)
    key, value = override.key_or_group, override.value()
    info = _find(cfg, override)
    if not info.is_known:
        return _unknown_key(space, cfg, override, key)
    if is_node(info.hint) and isinstance(value, dict):
        for name in value:
            if not _find(cfg, override, f"{key}.{name}").is_known:
                return _unknown_key(space, cfg, override, f"{key}.{name}")
    try:
        space.apply(text, cfg)
        return None
    except HydraException as error:
        fix = _without(text)
        is_dictionary_entry = info.is_free or (is_dictionary(info.hint) and isinstance(value, dict))
        if is_dictionary_entry and not text.startswith(("+", "~")):
            problem = "a new entry of a free-form dictionary is added with '+'"
            fix = Fix(add=(f"+{text}",))
        elif override.is_delete():
            problem = "a key of the schema cannot be taken away"
        elif override.is_add() and "An item is already at" in str(error):
            problem = "the key has a value already, which is replaced without '+'"
            fix = Fix(add=(text.lstrip("+"),))
        elif info.hint is None:
            problem = _reason(error)
        else:
            return _type_fault(key, value, info.hint, text)
        return Fault(key=key, given=text, problem=problem, fix=fix)


def _find(cfg: DictConfig, override: Override, key: str = "") -> KeyInfo:
    key = key or override.key_or_group
    if override.is_hydra_override():
        return find_key(cfg.hydra, key.removeprefix("hydra."))
    return find_key(cfg, key)


def _type_fault(key: str, value: object, hint: object, text: str) -> Fault:
    fixed: str | None = closest(str(value), enum_members(hint), SIMILAR_CHOICE)
    if accepts_integer(hint) and isinstance(value, float) and value.is_integer():
        fixed = str(int(value))
    problem = f"must be {describe_type(hint)}{did_you_mean(fixed and f'{key}={fixed}')}"
    if accepts_integer(hint) and isinstance(value, float) and math.isfinite(value):
        fixed = str(int(value))
    fix = Fix(add=(f"{key}={fixed}",)) if fixed else _without(text)
    return Fault(key=key, given=text, problem=problem, fix=fix)


def _unknown_key(space: ConfigSpace, cfg: DictConfig, override: Override, key: str) -> Fault:
    text = override.input_line or ""
    _, equals, value = text.partition("=")
    if override.is_hydra_override():
        known = [f"hydra.{name}" for name in leaf_keys(cfg.hydra)]
    else:
        known = [*([] if "." in key else space.groups), *leaf_keys(cfg)]
    near = [name for name in similar_keys(key, known) if name != key]
    problem = "there is no such key"
    if near:
        problem += did_you_mean(" or ".join(near))
    else:
        info = _find(cfg, override, key)
        where = info.parent or ("hydra" if override.is_hydra_override() else "the configuration")
        problem += f"\nkeys of {where}: {', '.join(info.siblings)}"
    if key != override.key_or_group:
        return Fault(key=key, given=text, problem=f"{key}: {problem}", fix=_without(text))
    fix = _without(text)
    if near and equals:
        fix = Fix(add=(f"{near[0]}{equals}{value}",), drop=(key,))
    return Fault(key=key, given=text, problem=problem, fix=fix)
