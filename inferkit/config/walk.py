"""A walk over a composed configuration: unknown keys, missing values, broken interpolations."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from inferkit.config.faults import Fault, Fix, did_you_mean
from inferkit.config.keys import describe_type, is_node, leaf_keys, similar_keys, type_hints
from inferkit.core.secrets import is_secret_source

HYDRA_ONLY = re.compile(r"\$\{(?:hydra|now):")
"""A worker, a check and a replay would each see another value."""
OPEN_NODES = frozenset({"params", "custom_params", "arch"})
"""Nodes whose entries are no keys of the schema: those are set with `++`."""


def structure_faults(cfg: DictConfig) -> list[Fault]:
    """Everything that keeps `cfg` from becoming a typed object.

    Unknown keys get past Hydra with `+node={key: value}`; missing values and interpolations
    would be found one at a time, on access.
    """
    faults = list(_unknown_keys(cfg, ""))
    known = list(leaf_keys(cfg))
    for node, name, key in _leaves(cfg, ""):
        if OmegaConf.is_missing(node, name):
            faults.append(_missing_value(key))
        elif OmegaConf.is_interpolation(node, name):
            faults += _broken_interpolation(node, name, key, known)
    return faults


def set_neutral(cfg: DictConfig, keys: Iterable[str]) -> None:
    """Harmless values where faults are, so that the other rules can be checked too."""
    with open_dict(cfg):
        for key in keys:
            parent, _, name = key.partition("[")[0].rpartition(".")
            node = OmegaConf.select(cfg, parent) if parent else cfg
            if not isinstance(node, DictConfig):
                continue
            if name not in type_hints(node):
                with open_dict(node):
                    node.pop(name, None)
                continue
            neutral: tuple[Any, ...] = (None, "", 0, False, [], {})
            for value in neutral:
                try:
                    node[name] = value
                    break
                except OmegaConfBaseException:
                    continue


def _unknown_keys(cfg: DictConfig, prefix: str) -> Iterator[Fault]:
    hints = type_hints(cfg)
    for name in map(str, cfg):
        key = f"{prefix}{name}"
        if name not in hints:
            near = similar_keys(key, [f"{prefix}{hint}" for hint in hints])
            guess = did_you_mean(near[0] if near else None)
            yield Fault(key=key, problem=f"there is no such key{guess}")
        elif is_node(hints[name]) and not _is_unresolved(cfg, name):
            yield from _unknown_keys(cfg[name], f"{key}.")


def _missing_value(key: str) -> Fault:
    group, _, name = key.rpartition(".")
    choice = f", or choose an option: {group}=..." if name == "_target_" else ""
    return Fault(
        key=key,
        problem=f"has no value; set {key}=...{choice}",
        fix=Fix(add=(f"{key}=VALUE",), is_example=True),
    )


def _broken_interpolation(
    node: DictConfig | ListConfig, name: Any, key: str, known: Sequence[str]
) -> Iterator[Fault]:
    text = str(OmegaConf.to_container(node, resolve=False)[name])  # type: ignore[index]
    whole = key.partition("[")[0]  # of an item of a list, the list is what can be written
    problem, fix = "", Fix(drop=(whole,))
    if (of_hydra := HYDRA_ONLY.search(text)) is not None:
        problem = f"{of_hydra[0]}...}} means something in the keys of hydra alone; write the value"
    else:
        try:
            node[name]
        except OmegaConfBaseException as error:
            is_secret = is_secret_source(key, text)
            problem, replaced = _reason(error, _hint(node, name), text, known, is_secret=is_secret)
            if replaced and whole == key:
                is_example = "VALUE" in replaced
                sign = "++" if OPEN_NODES.intersection(key.split(".")) else ""
                fix = Fix(add=(f"{sign}{key}={replaced}",), drop=(key,), is_example=is_example)
    if problem:
        yield Fault(key=key, given=f"{key}={text}", problem=problem, fix=fix)


def _reason(
    error: OmegaConfBaseException, hint: Any, text: str, known: Sequence[str], *, is_secret: bool
) -> tuple[str, str]:
    """Why an interpolation has no value, and one that would have; empty = unknown."""
    words = str(error)
    if (key := re.search(r"Interpolation key '([^']+)' not found", words)) is not None:
        near = similar_keys(key[1], list(known))
        guess = near[0] if near else None
        problem = f"there is no key {key[1]} to take the value from{did_you_mean(guess)}"
        return problem, text.replace(key[1], guess) if guess else ""
    if (variable := re.search(r"Environment variable '([^']+)' not found", words)) is not None:
        if is_secret:  # a default would be a typed one
            return f"the environment variable {variable[1]} is not set; set it to the secret", ""
        default = f"oc.env:{variable[1]},VALUE"
        problem = f"the environment variable {variable[1]} is not set; set it, or give a default: "
        return f"{problem}${{{default}}}", text.replace(f"oc.env:{variable[1]}", default)
    if (resolver := re.search(r"Unsupported interpolation type (\S+)", words)) is not None:
        problem = f"there is no resolver called {resolver[1]}; a value comes from another key, "
        return f"{problem}${{data.seed}}, or from the environment, ${{oc.env:NAME}}", ""
    if "Recursive interpolation" in words:
        return "takes its value from itself", ""
    if (value := re.search(r"Value '(.*)' of type", words)) is not None and hint is not None:
        return f"comes to {value[1]}, and must be {describe_type(hint)}", ""
    first = re.sub(r"^\w+ raised while resolving interpolation: ", "", words).splitlines()[0]
    return f"cannot be interpolated: {first.strip(chr(34))}", ""


def _hint(node: DictConfig | ListConfig, name: Any) -> Any:
    return type_hints(node).get(str(name)) if isinstance(node, DictConfig) else None


def _is_unresolved(node: DictConfig | ListConfig, name: Any) -> bool:
    return OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name)


def _leaves(
    node: DictConfig | ListConfig, prefix: str
) -> Iterator[tuple[DictConfig | ListConfig, Any, str]]:
    """(parent, name, dotted key) of every value that is no container."""
    is_list = isinstance(node, ListConfig)
    for name in range(len(node)) if is_list else list(node):
        key = f"{prefix}[{name}]" if is_list else f"{prefix}.{name}".removeprefix(".")
        child = None if _is_unresolved(node, name) else node[name]
        if isinstance(child, DictConfig | ListConfig):
            yield from _leaves(child, key)
        else:
            yield node, name, key
