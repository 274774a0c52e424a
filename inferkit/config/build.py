"""Builds the component that a configuration node names by `_target_`."""

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from inferkit.config.schema import TargetConfig
from inferkit.config.targets import OWN_PREFIX, is_allowed
from inferkit.core.error_place import is_raised_by_inferkit, told_with_place
from inferkit.core.errors import ComponentError, ConfigError, InferkitError
from inferkit.core.secrets import revealed

logger = logging.getLogger(__name__)

RESERVED = ("_target_", "params")
RUNTIME_KEYWORDS: Mapping[str, frozenset[str]] = {
    "engine": frozenset({"worker", "sampler"}),
    "kv_cache": frozenset({"specs", "max_model_len", "max_num_requests", "free_bytes"}),
    "scheduler": frozenset({"kv_cache", "max_model_len", "eos_token_ids", "clock", "attn_dp_size"}),
}
"""Node -> what the wiring page (`inferkit.runtime.assembly`) gives its target beside the node."""
TRANSFER_KEYWORDS = frozenset({"epoch", "rank", "host", "device_id", "receives", "write_timeout_s"})
ROLE_KEYWORDS: Mapping[tuple[str, str], frozenset[str]] = {
    ("scheduler", "prefill"): frozenset({"transfer"}),
    ("scheduler", "decode"): frozenset({"transfer", "host_store"}),
    ("disagg.transfer", "prefill"): TRANSFER_KEYWORDS,
    ("disagg.transfer", "decode"): TRANSFER_KEYWORDS,
}
"""The same of (node, role), where a role's component gets more."""


def runtime_keywords(key: str, role: str | None) -> frozenset[str]:
    """What the target of node `key` is called with beside the node's own keys."""
    return RUNTIME_KEYWORDS.get(key, frozenset()) | ROLE_KEYWORDS.get(
        (key, role or ""), frozenset()
    )


def build(node: TargetConfig, *, allowed_targets: Sequence[str], key: str, **runtime: Any) -> Any:
    """Call the target of `node` with its fields, its `params` and `runtime`, all as keywords.

    Args:
        key: where the node is in the configuration; named in errors.
        runtime: objects that are no configuration (other components, sizes found at run time).

    Raises:
        ConfigError: the target is not allowed, does not exist or does not take these keywords.
        ComponentError: the component itself raised something.
    """
    target = get_target(node._target_, allowed_targets=allowed_targets, key=f"{key}._target_")
    values = node_keywords(node)
    taken = [name for name in node.params if name in values or name in runtime]
    if taken:
        raise ConfigError(
            f"{key}.params sets {', '.join(taken)}, which {key} or inferkit itself gives to "
            f"{node._target_}; take it out of params"
        )
    given = sorted(set(values) & set(runtime))
    assert not given, f"{key}: {given} are configuration, they cannot be runtime arguments too"
    keywords = revealed(values | node.params) | runtime
    try:
        inspect.signature(target).bind(**keywords)
    except TypeError as error:
        raise ConfigError(
            f"{key}._target_={node._target_} cannot be built: {error}; it is called with "
            f"{', '.join(sorted(keywords)) or 'no argument'}"
        ) from None
    logger.debug("build key=%s target=%s", key, node._target_)
    return guarded(target, name=node._target_, key=f"{key}._target_")(**keywords)


def guarded(target: Callable[..., Any], *, name: str, key: str) -> Callable[..., Any]:
    """`target`, with what it raises told as an error of the component that `key` names.

    Errors that inferkit raises for its users are told as they are.
    """

    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return target(*args, **keywords)
        except Exception as error:
            if isinstance(error, InferkitError) and is_raised_by_inferkit(error):
                raise
            raise component_error(error, "built", name=name, key=key) from error

    return call


def component_error(error: Exception, done: str, *, name: str, key: str) -> ComponentError:
    """What to tell of a component that failed while it was `done` (imported, built)."""
    text = told_with_place(error, inside=_code_of(name))
    return ComponentError(f"{key}={name} failed while it was {done}: {text}")


def _code_of(name: str) -> Path | None:
    """The folder of a target's top-level package, or its module's file."""
    module = sys.modules.get(name.partition(".")[0])
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    return path.parent if path.name == "__init__.py" else path


def node_keywords(node: TargetConfig) -> dict[str, Any]:
    """The keywords that a node gives to its target, `params` left out."""
    return {f.name: getattr(node, f.name) for f in fields(node) if f.name not in RESERVED}


def get_target(name: str, *, allowed_targets: Sequence[str], key: str) -> Any:
    """Import what `name` names.

    Raises:
        ConfigError: it lies outside the allowed prefixes, or does not exist.
        ComponentError: its module raised something when it was imported.
    """
    if not is_allowed(name, allowed_targets):
        raise ConfigError(f"{key}={name} {not_allowed(name, allowed_targets)}")
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(f"{key}={name} cannot be found: {error}") from None
        raise component_error(error, "imported", name=name, key=key) from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{key}={name} cannot be found: {module_name} has no {attribute}")
    return getattr(module, attribute)


def not_allowed(name: str, allowed_targets: Sequence[str]) -> str:
    """The clause that refuses a target outside the allow-list."""
    allowed = ", ".join([OWN_PREFIX, *allowed_targets])
    top = name.split(".")[0] or "mypackage"
    return f"lies outside what may be built: {allowed}; allow it with 'allowed_targets=[{top}]'"
