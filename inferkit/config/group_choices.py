"""Choices of options (`parallel=tp2`, `+role=serve`): what is wrong with one, and what would do."""

import re
from collections.abc import Mapping, Sequence

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from inferkit.config.faults import Fault, Fix, closest, did_you_mean, key_of, show
from inferkit.config.meant import NO_PIPELINE
from inferkit.config.parallel_rules import sizes_named
from inferkit.config.plugins import missing_plugin
from inferkit.config.space import ConfigSpace
from inferkit.config.syntax import syntax_fault

PARALLEL = "parallel"
TARGET = "_target_"
SIMILAR_OPTION = 0.7
"""Options are short words: less likeness makes a cpu of an npu."""
SWAPPED = re.compile(r"tp(\d+)dp(\d+)")
PIPELINE = re.compile(r"(?:pp\d+.*|.*pp\d+)")


def repeated_choices(space: ConfigSpace, overrides: Sequence[str]) -> dict[str, Fault]:
    """Second choices of a group; a run has one option of each."""
    first: dict[str, str] = {}
    faults = {}
    for text in dict.fromkeys(overrides):
        if syntax_fault(space, text) is not None:
            continue
        override = space.parse(text)
        group = override.key_or_group
        if override.is_delete() or not space.is_group(group):
            continue
        if group in first:
            problem = (
                f"{first[group]} is chosen already, and a run has one option of {group}; keep one"
            )
            faults[text] = Fault(
                key=group, given=text, problem=problem, fix=Fix(add=(first[group],))
            )
        first.setdefault(group, text)
    return faults


def group_fault(space: ConfigSpace, override: Override, overrides: Sequence[str]) -> Fault | None:
    """What keeps this choice from being made."""
    group, text = override.key_or_group, override.input_line or ""
    value = override.value()
    names = [_written(name) for name in (value if isinstance(value, list) else [value])]
    has_default = group in space.defaults
    sign = "" if has_default else "+"
    plain = f"{group}={','.join(names)}"
    dropped = Fix(drop=(key_of(text),))
    problem, fix = "", Fix(add=(f"{sign}{plain}",), drop=dropped.drop)
    if override.package is not None:
        problem = f"a group goes to its own place; write {sign}{plain}"
    elif override.is_delete():
        problem, fix = _deletion_problem(space, override), dropped
    elif isinstance(value, dict):
        keys = tuple(f"{group.replace('/', '.')}.{name}={show(v)}" for name, v in value.items())
        problem = f"a group takes an option; its keys are set one by one: {' '.join(keys)}"
        fix = Fix(add=keys, drop=dropped.drop)
    elif has_default and isinstance(value, list):
        problem = f"a run has one option of {group}; several runs are written -m {plain}"
        fix = Fix(add=(plain,), flag="-m")
        if not names:
            problem, fix = "names no option", dropped
    elif unknown := [name for name in names if name not in space.options(group)]:
        return _unknown_option(space, text, unknown[0], overrides)
    elif has_default and (override.is_add() or override.is_force_add()):
        problem = f"{group} has a default already, which an option replaces without '+'"
    elif not has_default and not override.is_add():
        problem = f"{group} has no default, so its options are added with one '+'"
    return Fault(key=group, given=text, problem=problem, fix=fix) if problem else None


def _written(name: object) -> str:
    return "null" if name is None else str(name)


def _deletion_problem(space: ConfigSpace, override: Override) -> str:
    """Why there is nothing to take away; empty where there is."""
    group, name = override.key_or_group, override.value()
    chosen = space.defaults.get(group)
    if chosen is None:
        return f"takes nothing away: {group} has no default, so without +{group}=... there is none"
    if name not in (None, "", chosen):
        return f"takes nothing away: the default is {group}={chosen}"
    node = OmegaConf.select(space.compose_job([f"~{group}"]), group.replace("/", "."))
    if isinstance(node, DictConfig) and OmegaConf.is_missing(node, TARGET):
        listed = ", ".join(space.options(group))
        problem = "takes away what every run needs; leave it out, or choose an option"
        return f"{problem}\noptions of {group}: {listed}"
    return ""


def _unknown_option(space: ConfigSpace, text: str, name: str, overrides: Sequence[str]) -> Fault:
    group = space.parse(text).key_or_group
    has_default, options = group in space.defaults, space.options(group)
    dropped = Fix(drop=(key_of(text),)) if has_default else None
    listed = f"options of {group}: {', '.join(options)}"
    if not name:
        return Fault(key=group, given=text, problem=f"names no option\n{listed}", fix=dropped)
    if group == PARALLEL:
        name = SWAPPED.sub(r"dp\2tp\1", name)
        sizes = sizes_named(name) if name not in options else {}
        if sizes:
            return _unwritten_option(text, sizes, overrides)
        if PIPELINE.fullmatch(name):
            return Fault(key=group, given=text, problem=f"{NO_PIPELINE}\n{listed}", fix=dropped)
    plugin = missing_plugin(f"{group}={name}")
    if plugin:
        return Fault(key=group, given=text, problem=plugin, fix=dropped)
    sign = "" if has_default else "+"
    guess = closest(name, options, SIMILAR_OPTION) or _swapped(name, options)
    if group == PARALLEL and f"tp{name}" in options:
        guess = f"tp{name}"
    meant = did_you_mean(guess and f"{sign}{group}={guess}")
    fix = Fix(add=(f"{sign}{group}={guess}",)) if guess else dropped
    return Fault(
        key=group, given=text, problem=f"there is no such option{meant}\n{listed}", fix=fix
    )


def _swapped(name: str, options: Sequence[str]) -> str | None:
    """An option of the same letters in another order: `pt4` -> `tp4`."""
    return next((option for option in options if sorted(option) == sorted(name)), None)


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
