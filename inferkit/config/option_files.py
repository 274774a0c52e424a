"""What is wrong in the file of an option, with its place; Hydra tells it in terms of its own."""

import contextlib
import re
from pathlib import Path

import yaml
from hydra.errors import HydraException

from inferkit.config.faults import closest, did_you_mean
from inferkit.config.keys import describe_type, find_key, leaf_keys, similar_keys
from inferkit.config.space import ConfigSpace, shown_path
from inferkit.config.yaml_lines import key_lines, line_of

GLOBAL = "@package _global_"
UNREADABLE = re.compile("broken YAML|not written in UTF-8")


def file_problem(space: ConfigSpace, choice: str, error: HydraException) -> str:
    """Why a choice of options does not compose, as far as its file is to blame.

    Args:
        choice: `group=option`, as typed.
        error: what Hydra raised for it.
    """
    words = str(error)
    if UNREADABLE.search(words):
        return words  # the place is in it
    override = space.parse(choice)
    group, chosen = override.key_or_group, f"{override.key_or_group}/{override.value()}"
    named = re.match(r"In '([^']+)'", words)
    option = named[1] if named is not None and named[1] != space.config_name else chosen
    key = re.search(r"full_key: (\S+)", words)
    if key is not None:
        place = _place(space, option, key[1])
        return f"{place}: {_key_problem(space, option, key[1], words)}"
    place = _place(space, option, "defaults")
    if (absent := re.search(r"Could not find '([^']+)/([^'/]+)'", words)) is not None:
        options = space.options(absent[1])
        guess = closest(absent[2], options)
        meant = did_you_mean(guess and f"{absent[1]}={guess}")
        problem = f"{place}: chooses {absent[1]}={absent[2]}, and there is no such option{meant}"
        return f"{problem}\noptions of {absent[1]}: {', '.join(options)}"
    if (absent := re.search(r"Could not override '([^']+)'", words)) is not None:
        problem = f"{place}: overrides {absent[1]}, which has no default; "
        return f"{problem}choose it on the command line, +{absent[1]}=..."
    if (twice := re.search(r"Multiple values for (\S+?)\.", words)) is not None and group != twice[
        1
    ]:
        return f"{place}: chooses {twice[1]} beside its default; write `override /{twice[1]}: ...`"
    return _without_internals(error)


def _key_problem(space: ConfigSpace, option: str, key: str, words: str) -> str:
    """What is wrong with a key in the file of an option."""
    cfg = space.compose_job()
    if "not in '" in words:
        group = option.rpartition("/")[0]
        if key == group.replace("/", "."):
            return f"lacks the line `# {GLOBAL}` at its top, so its keys would go below {key}"
        near = similar_keys(key, list(leaf_keys(cfg)))
        return f"there is no key {key}{did_you_mean(near[0] if near else None)}"
    value = re.search(r"Value '(.*)' of type", words)
    hint = find_key(cfg, key).hint
    if value is None or hint is None:
        return words.splitlines()[1] if "\n" in words else words
    return f"{key}={value[1]} must be {describe_type(hint)}"


def _place(space: ConfigSpace, option: str, key: str) -> str:
    """`conf/scheduler/mine.yaml line 3`."""
    loaded = space.loader.repository.load_config(option)
    if loaded is None:
        return option
    file = Path(loaded.path.removeprefix("file://")) / f"{option}.yaml"
    node = option.rpartition("/")[0].replace("/", ".")
    line = 0
    with contextlib.suppress(OSError, yaml.YAMLError):
        lines = key_lines(file)
        line = line_of(lines, key) or line_of(lines, key.removeprefix(f"{node}."))
    return shown_path(file) + (f" line {line}" if line else "")


def _without_internals(error: HydraException) -> str:
    """What Hydra says, and the cause beneath it, without its advice to add keys with '+'."""
    parts = [str(error)] + ([str(error.__cause__)] if error.__cause__ else [])
    lines = [line.strip() for part in parts for line in part.splitlines()]
    internal = ("full_key:", "object_type=", "reference_type=", "To append to your config")
    return " ".join(line for line in lines if line and not line.startswith(internal))
