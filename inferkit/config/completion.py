"""What a shell offers for a word that is being typed: verbs, flags, groups, options, keys, values.

The shell's own part is Hydra's (`inferkit -sc install=bash`); it asks with the line typed so far.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from inferkit.config.arguments import FLAGS, program_name
from inferkit.config.faults import closest, did_you_mean
from inferkit.config.keys import enum_members, find_key, is_node, type_hints
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
COMMANDS = ("install", "uninstall", "query")
FOLDER_VERBS = ("replay", "report", "resume")
"""Verbs whose words are folders: the shell itself completes those where nothing else is offered."""
KEY_VERB = "explain"
"""The verb whose words may be keys, with or without a value."""
SWEEP_VERBS = ("check",)
HYDRA_VALUES: Mapping[str, Sequence[str]] = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--package": (),
    "--config-dir": (),
    "--config-path": (),
    "--config-name": (),
}
"""Flags that a value follows -> those that there are; empty = any, the shell completes files."""
SIGNS = re.compile(r"\+{1,2}|~|")
HERE = ("/", "./", "../", "~/")
"""How a value begins that is a path."""

FlagsOf = Callable[[str], Mapping[str, Sequence[str] | None]]
DerivedNames = Callable[[Sequence[str], ConfigSpace], Sequence[str]]


def asked_shell(words: Sequence[str]) -> tuple[str, str]:
    """(command, shell) of `-sc COMMAND=SHELL`.

    Raises:
        ConfigError: it is none of those that there are; or a command that is no console script
            wants to be completed.
    """
    usage = "write -sc install=bash, uninstall=bash or query=bash; shells are " + ", ".join(SHELLS)
    command, _, shell = words[0].partition("=") if len(words) == 1 else ("", "", "")
    if command not in COMMANDS:
        raise ConfigError(usage)
    if shell not in SHELLS:
        guess = did_you_mean(closest(shell, SHELLS))
        raise ConfigError(
            f"{shell or 'nothing'} is no shell whose completion is known{guess}; {usage}"
        )
    if command != "query" and program_name().startswith("python"):
        raise ConfigError(
            "shells complete the command `inferkit`, not `python -m inferkit`; both do the same. "
            f"Write: inferkit -sc {words[0]}"
        )
    return command, shell


def complete(
    line: str,
    space: ConfigSpace,
    verbs: Sequence[str],
    flags_of: FlagsOf = lambda verb: {},
    derived_names: DerivedNames = lambda overrides, space: (),
) -> list[str]:
    """Words that the last one of `line` may become, in alphabetical order.

    Args:
        line: what is typed up to the cursor, with the name of the program.
        flags_of: a verb's own flags -> the values that there are; None = it takes none.
        derived_names: of values that follow from the overrides typed so far.
    """
    words = _words(line)
    before, word = words[:-1], words[-1]
    verb = before[0] if before and before[0] in verbs else ""
    own = flags_of(verb) if verb else {}
    values = {**HYDRA_VALUES, **{flag: found for flag, found in own.items() if found is not None}}
    flag, equals, start = word.partition("=")
    if equals and flag in values:
        return sorted(f"{flag}={value}" for value in values[flag] if value.startswith(start))
    if before and before[-1] in values:
        return sorted(value for value in values[before[-1]] if value.startswith(word))
    if word.startswith("-"):
        flags = {*own, *_common_flags(verb)}
        return sorted(flag for flag in flags if flag.startswith(word))
    if verb in FOLDER_VERBS:
        return []
    typed = _overrides_of(before[1:] if verb else before, values)
    found = set(_overrides(word, typed, space))
    if not typed and not verb:
        found |= {one for one in verbs if one.startswith(word)}
    if verb == KEY_VERB and "=" not in word:
        keys = {one.removesuffix("=") for one in found if one[0] not in "+~"}
        overrides = [text for text in typed if "=" in text or text.startswith("~")]
        names = _steps(_derived(derived_names, overrides, space), word)
        found |= {one for one in (*keys, *names) if one.startswith(word)}
    return sorted(found)


def _derived(
    derived_names: DerivedNames, overrides: Sequence[str], space: ConfigSpace
) -> Sequence[str]:
    """None where a file of options is broken: a shell has no place for its error."""
    try:
        return derived_names(overrides, space)
    except HydraException:
        return ()


def _common_flags(verb: str) -> set[str]:
    """Flags that there are beside a verb's own."""
    if not verb:
        return {"-m", *FLAGS}
    flags = {"--help"} if verb in FOLDER_VERBS else {"--help", "--config-dir"}
    return flags | {"-m", "--multirun"} if verb in SWEEP_VERBS else flags


def _overrides_of(words: Sequence[str], values: Mapping[str, Sequence[str]]) -> list[str]:
    """Words without flags and their values."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not word.startswith("-") and before not in values
    ]


def _steps(names: Sequence[str], start: str) -> Iterator[str]:
    """Dotted names as far as the next dot: `rank.` where `ra` is typed, then `rank.heads`."""
    for name in names:
        if name.startswith(start):
            parent, dot, _ = name[len(start) :].partition(".")
            yield f"{start}{parent}{dot}"


def _words(line: str) -> list[str]:
    """Words after the program; the last one is empty where the next begins."""
    words = [word.strip("'\"") for word in line.split()]
    is_module = words[1:3] == ["-m", "inferkit"]
    own = words[3 if is_module else 1 :]
    return own if own and not line[-1].isspace() else [*own, ""]


def _overrides(word: str, before: Sequence[str], space: ConfigSpace) -> Iterator[str]:
    found = SIGNS.match(word)
    assert found is not None, "no sign is a sign too"
    sign, word = found[0], word[found.end() :]
    key, equals, value = word.partition("=")
    cfg = _composed(before, space)
    if not equals:
        yield from _groups(word, sign, space)
        if not sign or "." in word:
            added = {f"{name}=" for name in space.groups if name not in space.defaults}
            yield from (f"{sign}{name}" for name in _keys(word, cfg) if name not in added)
    elif space.is_group(key):
        done, comma, start = value.rpartition(",")
        options = [option for option in space.options(key) if option.startswith(start)]
        yield from (f"{sign}{key}={done}{comma}{option}" for option in options)
    else:
        yield from (f"{sign}{key}={text}" for text in _values(key, value, cfg))


def _composed(overrides: Sequence[str], space: ConfigSpace) -> DictConfig:
    """The configuration of the words typed before; without them where they do not compose."""
    try:
        return space.compose([text for text in overrides if "=" in text])
    except HydraException:
        return space.compose()


def _groups(start: str, sign: str, space: ConfigSpace) -> Iterator[str]:
    """Groups with the sign that they need; all of them where no sign was typed yet."""
    groups = [*space.groups]
    if start.startswith("hydra/"):
        groups = [f"hydra/{name}" for name in space.loader.list_groups("hydra")]
    for name in groups:
        needed = "" if name in space.defaults or "/" in name else "+"
        if name.startswith(start) and (sign in ("", needed) or (sign == "~" and not needed)):
            yield f"{sign or needed}{name}="


def _keys(start: str, cfg: DictConfig) -> Iterator[str]:
    """Keys of the node that `start` lies in: `scheduler.` -> `scheduler.batch_size=`, ..."""
    parent, dot, last = start.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    if not isinstance(node, DictConfig):
        return
    for name, hint in type_hints(node).items():
        if not name.startswith(last) or (name == "hydra" and not last):
            continue
        is_inner = is_node(hint) or isinstance(node._get_node(name), DictConfig)
        yield f"{parent}{dot}{name}{'.' if is_inner else '='}"


def _values(key: str, start: str, cfg: DictConfig) -> Iterator[str]:
    """Members of an enum, true and false, files, or the value that it has now."""
    if start.startswith(HERE):
        yield from _files(start)
        return
    hint = find_key(cfg, key).hint
    closed = enum_members(hint) or (["true", "false"] if hint is bool else [])
    if closed:
        yield from (value for value in closed if value.startswith(start))
    elif not start:
        node = OmegaConf.select(cfg, key)
        if isinstance(node, str | int | float):
            yield str(node)


def _files(start: str) -> Iterator[str]:
    folder, _, name = start.rpartition("/")
    try:
        entries = sorted(os.scandir(os.path.expanduser(f"{folder}/")), key=lambda one: one.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(name) and (name or not entry.name.startswith(".")):
            yield f"{folder}/{entry.name}{'/' if entry.is_dir() else ''}"
