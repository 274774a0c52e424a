"""Secrets of a configuration: typed ones are refused, those of the environment are marked.

What is written of a configuration holds `${oc.env:NAME}` in their place; `inferkit.core.secrets`
says what a secret is and how it is shown.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from inferkit.config.faults import Fault, Fix
from inferkit.config.schema import InferenceConfig
from inferkit.core.secrets import (
    ENV_DEFAULT,
    MIN_HIDDEN,
    SecretText,
    hide,
    is_secret_key,
    is_secret_name,
    is_secret_source,
    keep_hidden,
    mark,
    references,
    secret_names,
    variable_name,
    without_typed,
)

JUDGED_ELSEWHERE = ("disagg.router_url", "router.prefill_urls", "router.decode_urls")
"""Addresses whose rule takes no password at all."""
HYDRA_NODES = ("job.env_set", "launcher", "sweeper.params")
"""Of Hydra's own part, what a user fills in; Hydra writes it into every run directory."""
ENV_COPY = "job.env_copy"
IS_TYPED_SECRET = "is a secret as plain text"
"""How the fault of a typed secret begins."""

Path = tuple[str | int, ...]


def secret_faults(cfg: DictConfig) -> Iterator[Fault]:
    """Secrets that stand in a composed configuration themselves: typed, or in an option's file."""
    held = _held_values()
    for path, value in _raw_leaves(OmegaConf.to_container(cfg, resolve=False)):
        key = dotted(path)
        if key.partition("[")[0] in JUDGED_ELSEWHERE:
            continue
        fault = _typed_fault(key, path, value, held)
        if fault is not None:
            yield fault
        elif _is_from_environment(key, value) and not _is_text(cfg, path):
            yield _no_text(key, value)


def hydra_secret_faults(hydra: DictConfig) -> Iterator[Fault]:
    """The same of Hydra's own part."""
    held = _held_values()
    for node in HYDRA_NODES:
        selected = OmegaConf.select(hydra, node)
        if not isinstance(selected, DictConfig):
            continue
        for path, value in _raw_leaves(OmegaConf.to_container(selected, resolve=False)):
            fault = _typed_fault(f"hydra.{node}.{dotted(path)}", path, value, held)
            if fault is not None:
                yield fault
    copied = [str(name) for name in OmegaConf.select(hydra, ENV_COPY) or ()]
    for name in filter(is_secret_name, copied):
        yield Fault(
            key=f"hydra.{ENV_COPY}",
            given=f"hydra.{ENV_COPY}=[{','.join(copied)}]",
            problem=f"{name} looks like a secret, and Hydra writes its value into the run "
            "directory; processes of a run inherit the environment without it",
            fix=Fix(drop=(f"hydra.{ENV_COPY}",)),
        )


def _typed_fault(key: str, path: Path, value: Any, held: Mapping[str, str]) -> Fault | None:
    """A secret that a leaf holds itself.

    Args:
        held: values of the environment -> names of their variables: a shell may have put one there.
    """
    if isinstance(value, bool) or value is None or value in ("", "???"):
        return None
    text = str(value)
    found = next((known for known in held if known in text), None)
    if found is not None:
        instead = text.replace(found, f"${{oc.env:{held[found]}}}")
    elif _is_from_environment(key, value):
        if not ENV_DEFAULT.search(text):
            return None
        instead = f"${{oc.env:{references(text)[0]}}}"
    elif is_secret_key(key) and "${" not in text:
        instead = f"${{oc.env:{variable_name(_name_of(path))}}}"
    else:
        instead = without_typed(text, "${oc.env:{}}")
        if instead == text:
            return None
    is_whole = re.fullmatch(r"\$\{oc\.env:\w+\}", instead)
    sign = "++" if "params." in key or key.startswith("hydra.") else ""
    override = f"{sign}{key}={instead}" if is_whole else f'{sign}{key}="{instead}"'
    is_entry = any(isinstance(part, int) for part in path)
    shown = mark((held[found],) if found else ()) if is_whole else hide(without_typed(text))
    return Fault(
        key=key,
        given=f"{key}={shown}",
        problem=f"{IS_TYPED_SECRET}, which a run directory and its logs would show; put it into an "
        f"environment variable and write {instead}",
        # An entry of a list cannot be set by itself.
        fix=None if is_entry else Fix(add=(override,), is_example=True),
    )


def _is_from_environment(key: str, value: Any) -> bool:
    return isinstance(value, str) and bool(references(value)) and is_secret_source(key, value)


def _held_values() -> dict[str, str]:
    names = [name for name in secret_names() if len(os.environ[name]) >= MIN_HIDDEN]
    return {os.environ[name]: name for name in names}


def _no_text(key: str, source: str) -> Fault:
    """A secret that would be a number or a dictionary, which nobody could recognise later."""
    name = " ".join(references(source))
    return Fault(
        key=key,
        given=f"{key}={source}",
        problem=f"is a secret and must be a text; write ${{oc.env:{name}}} without oc.decode",
        fix=Fix(add=(f"++{key}=${{oc.env:{name}}}",)),
    )


def _is_text(cfg: DictConfig, path: Path) -> bool:
    """Whether an interpolation comes to a text or to nothing; one that is broken is told of
    elsewhere."""
    try:
        return isinstance(_follow(cfg, path), str | None)
    except OmegaConfBaseException:
        return True


def _name_of(path: Path) -> str:
    """The part of a key by which it is a secret."""
    names = [str(part) for part in path if isinstance(part, str)]
    return next((name for name in reversed(names) if is_secret_name(name)), names[-1])


def keep_secrets(cfg: DictConfig, typed: InferenceConfig) -> None:
    """Put a `SecretText` wherever `typed`, made from `cfg`, got a secret from the environment."""
    for path, secret in _secrets(cfg):
        _put(typed, path, secret)


def masking_overrides(cfg: DictConfig) -> list[str]:
    """Overrides after which a composition shows `<secret NAME>` where it has secrets."""
    masks: dict[str, Any] = {}
    for path, secret in _secrets(cfg):
        place = next((i for i, part in enumerate(path) if isinstance(part, int)), None)
        if place is None:
            masks[dotted(path)] = f"'{secret.shown}'"
        else:  # an entry of a list cannot be set by itself
            masks[dotted(path[:place])] = f"['{secret.shown}']"
    return [f"++{key}={text}" for key, text in masks.items()]


def _secrets(cfg: DictConfig) -> list[tuple[Path, SecretText]]:
    """Where a composed configuration has secrets from the environment, resolved."""
    sources = []
    for path, source in _raw_leaves(OmegaConf.to_container(cfg, resolve=False)):
        if isinstance(source, str) and "${" in source:
            with contextlib.suppress(OmegaConfBaseException):  # broken ones are told elsewhere
                value = _follow(cfg, path)
                if isinstance(value, str) and value:
                    sources.append((path, source, value))
    own = {value for path, source, value in sources if is_secret_source(dotted(path), source)}

    def is_secret(value: str) -> bool:  # also ${scheduler.params.api_key}
        return value in own or any(len(part) >= MIN_HIDDEN and part in value for part in own)

    return [(path, SecretText(value, text)) for path, text, value in sources if is_secret(value)]


def secret_variables(
    config: InferenceConfig, variables: Mapping[str, str] = os.environ
) -> frozenset[str]:
    """Names of the environment variables that hold the secrets of a configuration."""
    names = {config.disagg.secret_env} if config.disagg.secret_env else set()
    for _, value in _raw_leaves(config):
        if isinstance(value, SecretText):
            named = references(value.source)
            names |= {*named} or {n for n, text in variables.items() if text == str(value)}
    return frozenset(names)


def hide_secrets_of(config: InferenceConfig) -> None:
    """Have this process, and those that it starts, hide the secrets of `config` in all that they
    write."""
    keep_hidden(set(secret_variables(config)))


def dotted(path: Sequence[str | int]) -> str:
    """`scheduler.params.keys[0]`."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")


def _raw_leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, value) of everything that is no container; interpolations are texts."""
    if is_dataclass(node):
        for entry in fields(node):
            yield from _raw_leaves(getattr(node, entry.name), (*path, entry.name))
    elif isinstance(node, dict):
        for name, child in node.items():
            yield from _raw_leaves(child, (*path, name))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _raw_leaves(child, (*path, index))
    else:
        yield path, node


def _follow(node: Any, path: Path) -> Any:
    for part in path:
        node = getattr(node, str(part)) if is_dataclass(node) else node[part]
    return node


def _put(typed: InferenceConfig, path: Path, secret: SecretText) -> None:
    node = _follow(typed, path[:-1])
    if is_dataclass(node):
        setattr(node, str(path[-1]), secret)
    else:
        node[path[-1]] = secret
