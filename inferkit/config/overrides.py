"""Composition that names every faulty override instead of stopping at the first."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from inferkit.config.faults import Fault, Fix, key_of, shell_quote
from inferkit.config.group_choices import group_fault, repeated_choices
from inferkit.config.key_overrides import key_fault
from inferkit.config.keys import find_key, is_text, list_item_type, type_hints
from inferkit.config.option_files import file_problem
from inferkit.config.plugins import IS_MISSING, missing_in_file
from inferkit.config.secrets import hydra_secret_faults
from inferkit.config.space import ConfigSpace
from inferkit.config.syntax import syntax_fault as syntax_fault

ROLE = "role"
LOADED_ROLES = ("serve", "cluster")
"""Roles that are benchmarked as cells of a sweep: with a load on them they come to an end."""


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
    faults: dict[str, Fault] = repeated_choices(space, overrides)
    groups: list[str] = []
    keys: list[str] = []
    apart = _apart(space, overrides)
    values = dict(zip(overrides, overrides[1:], strict=False))
    told = {values[text] for text in apart}  # with the key before them
    for text in overrides:
        if text in told:
            continue
        fault = faults.get(text) or apart.get(text) or syntax_fault(space, text)
        fault = fault or _sweep_fault(space, space.parse(text))
        if fault is None and _is_group_choice(space, space.parse(text)):
            fault = group_fault(space, space.parse(text), overrides)
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
    unknown = _nodes_unknown(faults.values())
    for text in keys:
        if key_of(text).startswith(unknown) or _is_of_unknown_option(space, cfg, text, faults):
            continue  # another option has other keys
        is_hydra = space.parse(text).is_hydra_override()
        fault = key_fault(space, full if is_hydra else cfg, text, overrides)
        if fault is not None:
            faults[text] = fault
    ordered = tuple(faults[text] for text in dict.fromkeys(overrides) if text in faults)
    if full is not space.compose(groups):
        ordered += tuple(hydra_secret_faults(full.hydra))
    used = tuple(text for text in overrides if text not in faults and text not in told)
    return Composition(cfg=cfg, hydra=full.hydra, faults=ordered, used=used)


def _apart(space: ConfigSpace, overrides: Sequence[str]) -> dict[str, Fault]:
    """Keys whose value is the next word, without a '=' between: `scheduler.batch_size 4`."""
    faults = {}
    for key, value in zip(overrides, overrides[1:], strict=False):
        joined = f"{key}={value}"
        if "=" in key + value or key.startswith("~") or "." not in key or value.startswith("~"):
            continue
        if syntax_fault(space, joined) is None and find_key(space.compose_job(), key).is_known:
            fix = Fix(add=(joined,), drop=(key, value))
            problem = f"is one word with its value; write {shell_quote(joined)}"
            faults[key] = Fault(key=key, given=f"{key} {value}", problem=problem, fix=fix)
    return faults


def _nodes_unknown(faults: Collection[Fault]) -> tuple[str, ...]:
    """How keys begin whose node has a faulty option: nobody knows what it would hold."""
    nodes = {fault.key.replace("/", ".") for fault in faults if "/" in fault.key}
    if any(IS_MISSING in fault.problem for fault in faults):
        nodes |= {"hydra.launcher", "hydra.sweeper"}
    return tuple(f"{node}." for node in nodes)


def _is_of_unknown_option(
    space: ConfigSpace, cfg: DictConfig, text: str, faults: Mapping[str, Fault]
) -> bool:
    """Whether a free-form dictionary may have this entry by an option that could not be chosen.

    Options of groups that are no node of their own (role, experiment) set any key.
    """
    key = key_of(text)
    refused = [fault.key for fault in faults.values() if space.is_group(fault.key)]
    nodes = type_hints(cfg)
    return (
        any(group not in nodes or group == ROLE or key.startswith(f"{group}.") for group in refused)
        and find_key(cfg, key).is_free
    )


def _sweep_fault(space: ConfigSpace, override: Override) -> Fault | None:
    """Several values where one is asked for."""
    if not override.is_sweep_override():
        return None
    text = override.input_line or ""
    key, _, value = text.partition("=")
    name = override.key_or_group
    problem, fix = "several values need -m (one run per value)", Fix(flag="-m")
    if name == ROLE and not _all_end(override):
        problem = "a run has one role, and a role serves until it is stopped; start each by itself"
        first = next(override.sweep_string_iterator())
        fix = Fix(add=(f"{override.get_key_element()}={first}",))
        return Fault(key=name, given=text, problem=problem, fix=fix)
    if space.is_group(name):
        problem = f"a run has one option of {name}; several need -m (one run per option)"
        return Fault(key=name, given=text, problem=problem, fix=fix)
    hint = find_key(space.compose_job(), name).hint
    as_list, as_text = f"{key}=[{value}]", f"{key}='{value}'"
    if hint is not None and list_item_type(hint) is not None:
        problem, fix = f"is a list, which is written {shell_quote(as_list)}", Fix(add=(as_list,))
    elif hint is None or is_text(hint):
        problem += f"; a text with commas is written {shell_quote(as_text)}"
    return Fault(key=name, given=text, problem=problem, fix=fix)


def _all_end(override: Override) -> bool:
    """Whether every role of a sweep comes to an end in it."""
    return not override.is_discrete_sweep() or all(
        value in LOADED_ROLES for value in override.sweep_string_iterator()
    )


def _is_group_choice(space: ConfigSpace, override: Override) -> bool:
    if override.is_delete() and "." in override.key_or_group:
        return False
    return space.is_group(override.key_or_group)


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
                problem = missing_in_file(str(error)) or file_problem(space, text, error)
                fix = Fix(drop=(key_of(text),))
                faults[text] = Fault(key=key, given=text, problem=problem, fix=fix)
        return good, faults
