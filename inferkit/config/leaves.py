"""Configurations as flat tables: dotted key -> value."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf


def flat(value: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of nested dictionaries. Lists and empty dictionaries are leaves."""
    found: dict[str, Any] = {}
    for name, child in value.items():
        key = f"{prefix}{name}"
        if isinstance(child, Mapping) and child:
            found |= flat(child, f"{key}.")
        else:
            found[key] = child
    return found


def unresolved(cfg: DictConfig) -> dict[str, Any]:
    """Dotted key -> value as it was written: `${...}` stays, a missing value is `???`."""
    container = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    assert isinstance(container, dict), "a configuration is a dictionary"
    return flat(container)
