"""Builds the component that a configuration node names by `_target_`."""

import importlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from inferkit.config.schema import TargetConfig
from inferkit.config.targets import OWN_PREFIX, is_allowed
from inferkit.core.errors import ConfigError

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
        Exception: what the component itself raised, with its own traceback and a note of `key`.
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
    keywords = values | node.params | runtime
    try:
        inspect.signature(target).bind(**keywords)
    except TypeError as error:
        raise ConfigError(
            f"{key}._target_={node._target_} cannot be built: {error}; it is called with "
            f"{', '.join(sorted(keywords)) or 'no argument'}"
        ) from None
    logger.debug("build key=%s target=%s", key, node._target_)
    try:
        return target(**keywords)
    except Exception as error:
        error.add_note(f"while building {key} ({node._target_})")
        raise


def node_keywords(node: TargetConfig) -> dict[str, Any]:
    """The keywords that a node gives to its target, `params` left out."""
    return {f.name: getattr(node, f.name) for f in fields(node) if f.name not in RESERVED}


def get_target(name: str, *, allowed_targets: Sequence[str], key: str) -> Any:
    """Import what `name` names.

    Raises:
        ConfigError: it lies outside the allowed prefixes, or does not exist.
        Exception: what its module raised when imported, with a note of `key`.
    """
    if not is_allowed(name, allowed_targets):
        raise ConfigError(f"{key}={name} {not_allowed(name, allowed_targets)}")
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{key}={name} cannot be found: {error}") from None
        error.add_note(f"while importing {key} ({name})")
        raise
    except Exception as error:
        error.add_note(f"while importing {key} ({name})")
        raise
    if not hasattr(module, attribute):
        raise ConfigError(f"{key}={name} cannot be found: {module_name} has no {attribute}")
    return getattr(module, attribute)


def not_allowed(name: str, allowed_targets: Sequence[str]) -> str:
    """The clause that refuses a target outside the allow-list."""
    allowed = ", ".join([OWN_PREFIX, *allowed_targets])
    top = name.split(".")[0] or "mypackage"
    return f"lies outside what may be built: {allowed}; allow it with 'allowed_targets=[{top}]'"
