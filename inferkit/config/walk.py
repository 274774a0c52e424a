"""A walk over a composed configuration: unknown keys, missing values, broken interpolations."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from inferkit.config.faults import Fault, Fix, did_you_mean
from inferkit.config.keys import is_node, similar_keys, type_hints


def structure_faults(cfg: DictConfig) -> list[Fault]:
    """Everything that keeps `cfg` from becoming a typed object.

    Unknown keys get past Hydra with `+node={key: value}`; missing values and interpolations
    would be found one at a time, on access.
    """
    faults = list(_unknown_keys(cfg, ""))
    for node, name, key in _leaves(cfg, ""):
        if OmegaConf.is_missing(node, name):
            faults.append(_missing_value(key))
        elif OmegaConf.is_interpolation(node, name):
            faults += _broken_interpolation(node, name, key)
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


def _broken_interpolation(node: DictConfig | ListConfig, name: Any, key: str) -> Iterator[Fault]:
    text = OmegaConf.to_container(node, resolve=False)[name]  # type: ignore[index]
    try:
        node[name]
    except OmegaConfBaseException as error:
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error))
        reason = reason.splitlines()[0].strip('"')
        yield Fault(key=key, given=f"{key}={text}", problem=f"cannot be interpolated: {reason}")


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
