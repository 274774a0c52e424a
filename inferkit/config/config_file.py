"""A YAML file with configuration keys, as the words of a command line that would give the same.

So a file goes through every check that a command line does.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from inferkit.config.check import Checker
from inferkit.config.faults import key_of
from inferkit.config.keys import find_key, is_dictionary, type_hints
from inferkit.config.leaves import flat, unresolved
from inferkit.config.provenance import plain
from inferkit.config.schema import InferenceConfig
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError

DECODE_KEYS = "scheduler.num_reserved_decode_tokens"
"""Only the schema of a decode scheduler has it."""
AUTOMATIC = (
    "platform._target_",
    "engine.max_model_len",
    "scheduler.batch_size",
    "scheduler.max_prefill_tokens",
)
"""Keys that `inferkit.config.resolve` gives a value of its own."""


def words_of_file(file: Path, space: ConfigSpace) -> list[str]:
    """Overrides that give every key of `file` its value; keys that it lacks keep their defaults.

    A dictionary of the file takes the place of the default one. What Hydra keeps of its own under
    `hydra` is left out.

    Raises:
        ConfigError: the file cannot be read, or is no dictionary of keys.
    """
    leaves = leaves_of_file(file)
    role = leaves.pop("role", None)
    groups = [f"+role={role}"] if role is not None else []
    if DECODE_KEYS in leaves and role != "decode":
        groups.append("scheduler=decode")
    base = space.compose_job([text for text in groups if _is_option(space, text)])
    words = [*groups, *_deletions(leaves, base), *_values(leaves, base)]
    return _without_automatic(words, leaves, space)


def leaves_of_file(file: Path) -> dict[str, Any]:
    """Dotted key -> value of every key of a file, as it is written: `${...}` is not resolved.

    Raises:
        ConfigError: the file cannot be read, or is no dictionary of keys.
    """
    return flat(_content(file))


def _content(file: Path) -> Mapping[str, Any]:
    try:
        loaded = OmegaConf.load(file)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{place}: broken YAML: {error.problem}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file}: cannot be read as YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{file}: holds no configuration: its keys must be names such as 'model'")
    content = OmegaConf.to_container(loaded, resolve=False)
    assert isinstance(content, dict), "it is a dictionary"
    if "defaults" in content:
        raise ConfigError(
            f"{file}: has a defaults list, so it is an option of a group and no configuration; "
            "name its folder of options with --config-dir, and write GROUP=OPTION"
        )
    content.pop("hydra", None)
    known = type_hints(OmegaConf.structured(InferenceConfig))
    if content and not known.keys() & set(map(str, content)):
        names = ", ".join(map(str, list(content)[:3]))
        raise ConfigError(
            f"{file}: holds no configuration: its keys are {names}{', ...' * (len(content) > 3)}; "
            f"those of a configuration are {', '.join(known)}"
        )
    return {str(key): value for key, value in content.items()}


def _is_option(space: ConfigSpace, text: str) -> bool:
    group, _, option = text.lstrip("+").partition("=")
    return option in space.options(group)


def _deletions(leaves: Mapping[str, Any], base: DictConfig) -> Iterator[str]:
    """Entries of dictionaries that the file writes anew."""
    for key in unresolved(base):
        node = _free_node(base, key)
        if node and key not in leaves and any(f"{leaf}.".startswith(f"{node}.") for leaf in leaves):
            yield f"~{key}"


def _values(leaves: Mapping[str, Any], base: DictConfig) -> Iterator[str]:
    """What the file has otherwise than `base`."""
    known = unresolved(base)
    for key, value in leaves.items():
        if (
            key not in known
            or known[key] != value
            or isinstance(known[key], bool) != isinstance(value, bool)
        ):
            sign = "++" if _free_node(base, key) else ""
            yield f"{sign}{key}={as_word(value)}"


def _free_node(base: DictConfig, key: str) -> str:
    """The free-form dictionary that `key` is an entry of; empty = of none."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        info = find_key(base, name)
        if info.is_known and is_dictionary(info.hint):
            return name
    return ""


def _without_automatic(
    words: list[str], leaves: Mapping[str, Any], space: ConfigSpace
) -> list[str]:
    """Without what automatic values become anyway, as a resolved configuration records them.

    The roles of a cluster would take them for values that the user wants in every role.
    """
    rest = [word for word in words if key_of(word) not in AUTOMATIC]
    if len(rest) == len(words):
        return words
    config = Checker(space, is_run=False).check_overrides(rest).config
    if config is None:
        return words
    values = flat(plain(config))
    return [word for word in words if word in rest or values[key_of(word)] != leaves[key_of(word)]]


def as_word(value: Any) -> str:
    """A value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ",".join(map(as_word, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_word(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        # Only a quote ends the text, and only backslashes before one mean something.
        return "'" + re.sub(r"(\\*)(['])", r"\1\1\\\2", re.sub(r"(\\+)$", r"\1\1", value)) + "'"
    return str(value)
