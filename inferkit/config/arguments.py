"""The words of a command line: Hydra's flags, overrides, and what is wrong with the rest."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.utils import get_args_parser

from inferkit.config.faults import Command, closest, did_you_mean
from inferkit.config.keys import leaf_keys, similar_keys
from inferkit.config.meant import renamed
from inferkit.config.space import CONF_DIR, CONFIG_NAME, ConfigSpace

FLAGS = (
    "--help",
    "--hydra-help",
    "--version",
    "--cfg",
    "--resolve",
    "--package",
    "--run",
    "--multirun",
    "--shell-completion",
    "--config-dir",
    "--info",
)
FLAGS_OF_RUNS = (
    "--hydra-help",
    "--cfg",
    "--resolve",
    "--package",
    "--run",
    "--shell-completion",
    "--info",
)
"""Those of FLAGS, and of Hydra's others, that no verb takes."""
FLAG_VALUES = {
    "--cfg": "job, hydra or all",
    "--info": "all, config, defaults, defaults-tree, plugins or searchpath",
    "--package": "a node, such as scheduler",
    "--config-dir": "a folder of options",
    "--config-path": "a folder that holds a configuration",
    "--config-name": "the name of a file without .yaml",
}
SHOWS = ("hydra_help", "info", "cfg", "shell_completion")
"""Flags that show something and run nothing."""


class UsageError(Exception):
    """The command line cannot be read; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A command line, read once."""

    overrides: tuple[str, ...]
    flags: tuple[str, ...]
    """All flags with their values, in an order that Hydra's own parser accepts."""
    is_multirun: bool
    shows: str
    """One of SHOWS; empty for a run."""
    config_dir: Path | None
    conf_dir: Path
    config_name: str
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    """Flags of a verb's own."""

    def command(self, program: str, verb: str = "") -> Command:
        return Command(program=program, verb=verb, flags=self.flags, overrides=self.overrides)

    def space(self) -> ConfigSpace:
        return ConfigSpace(
            config_dir=self.config_dir, conf_dir=self.conf_dir, config_name=self.config_name
        )


AddOptions = Callable[[argparse.ArgumentParser], None]


def parse_arguments(argv: Sequence[str], add_options: AddOptions | None = None) -> Arguments:
    """Read flags and overrides in any order.

    Args:
        add_options: declares the flags of a verb's own, which none of Hydra's may be named like.

    Raises:
        UsageError: an unknown flag, or flags that exclude each other.
    """
    own = _Parser(add_help=False, allow_abbrev=False)
    if add_options is not None:
        add_options(own)
    options, argv = own.parse_known_args(list(argv))
    parser = _Parser(parents=[get_args_parser()], add_help=False, allow_abbrev=False)
    found, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        raise UsageError(_unknown_flag(unknown[0], _flags_of(own)))
    if found.experimental_rerun is not None:
        raise UsageError("--experimental-rerun loads a pickle, which inferkit never does")
    shows = next((name for name in SHOWS if _is_set(found, name)), "")
    if found.multirun and shows in ("cfg", "info"):
        raise UsageError(
            f"-m starts a sweep and --{shows} shows one configuration; leave one of them out "
            "(of a sweep, show one cell: give every key a single value)"
        )
    for name in ("resolve", "package"):
        if _is_set(found, name) and shows != "cfg":
            raise UsageError(f"--{name} has no effect without --cfg job, --cfg hydra or --cfg all")
    config_dir = Path(found.config_dir) if found.config_dir else None
    for flag, folder in (("--config-dir", config_dir), ("--config-path", found.config_path)):
        if folder and not Path(folder).is_dir():
            raise UsageError(f"{flag} {folder}: there is no such folder")
    conf_dir = Path(found.config_path).resolve() if found.config_path else CONF_DIR
    config_name = found.config_name or CONFIG_NAME
    places = [place for place in (config_dir, conf_dir) if place is not None]
    if not any((place / f"{config_name.removesuffix('.yaml')}.yaml").is_file() for place in places):
        where = " or ".join(map(str, places)) if found.config_path or config_dir else "conf/"
        raise UsageError(f"--config-name {config_name}: there is no {config_name}.yaml in {where}")
    return Arguments(
        overrides=tuple(found.overrides),
        flags=tuple(_flags(found)),
        is_multirun=found.multirun,
        shows=shows,
        config_dir=config_dir,
        conf_dir=conf_dir,
        config_name=config_name,
        options=options,
    )


def own_flags(add_options: AddOptions | None) -> dict[str, tuple[str, ...] | None]:
    """Flags of a verb's own -> the values that there are (empty = any), None = it takes none."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    if add_options is not None:
        add_options(parser)
    return {
        flag: None if action.nargs == 0 else tuple(map(str, action.choices or ()))
        for action in parser._actions
        for flag in action.option_strings
    }


def check_verb_flags(verb: str, arguments: Arguments) -> None:
    """Refuse flags that a verb would ignore.

    Raises:
        UsageError: one that shows something else, or starts a run.
    """
    given = [flag for flag in arguments.flags if flag in FLAGS_OF_RUNS]
    if not given:
        return
    program, flag = program_name(), given[0]
    advice = f"{program} {verb} --help shows what it takes"
    if flag in ("--cfg", "--info"):
        shown = "--cfg job" if flag == "--cfg" else flag
        advice = f"{program} {shown} is a command of its own"
    raise UsageError(f"{flag} has no effect with {verb}; leave it out ({advice})")


def _flags_of(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(_flag_problem(message))


def _flag_problem(message: str) -> str:
    """What argparse says of a flag, in the words of this program."""
    if (
        lacks := re.match(r"argument (--[\w-]+)\S*: expected (?:one|at least one)", message)
    ) is not None:
        return f"{lacks[1]} needs a value: {FLAG_VALUES.get(lacks[1], 'VALUE')}"
    wrong = re.match(
        r"argument (--[\w-]+)\S*: invalid choice: '(.*)' \(choose from (.*)\)", message
    )
    if wrong is not None:
        choices = [choice.strip("' ") for choice in wrong[3].split(",")]
        guess = did_you_mean(closest(wrong[2], choices))
        known = f"choices are {', '.join(choices)}"
        return f"{wrong[1]} {wrong[2]}: there is no such choice{guess}\n{known}"
    return message


def _is_set(found: argparse.Namespace, name: str) -> bool:
    return getattr(found, name) not in (None, False)


def _flags(found: argparse.Namespace) -> list[str]:
    flags = []
    for name in ("multirun", "run", "resolve", "hydra_help", "shell_completion"):
        if _is_set(found, name):
            flags.append("-m" if name == "multirun" else f"--{name.replace('_', '-')}")
    for name in ("config_dir", "config_path", "config_name", "cfg", "package", "info"):
        if _is_set(found, name):
            flags += [f"--{name.replace('_', '-')}", str(getattr(found, name))]
    return flags


def _unknown_flag(flag: str, own_flags: Sequence[str]) -> str:
    """A flag of another program is most often a key that is written otherwise here."""
    name, _, value = flag.partition("=")
    guess = closest(name, (*own_flags, *FLAGS), cutoff=0.75)
    if guess is not None:
        return f"{name} is no flag{did_you_mean(guess)}"
    key, space = name.lstrip("-").replace("-", "_"), ConfigSpace()
    known = [*space.groups, *leaf_keys(space.compose_job())]
    meant = renamed(key, value)
    if meant is None and (near := similar_keys(key, known)):
        sign = "+" if near[0] in space.groups and near[0] not in space.defaults else ""
        meant = f"{sign}{near[0]}={value or 'VALUE'}"
    return (
        f"{name} is no flag; options are written KEY=VALUE, for example "
        f"{meant or 'scheduler.batch_size=8'}\n"
        "(python -m inferkit --cfg job lists all keys)"
    )


def program_name() -> str:
    """How this process was started, as a user would type it."""
    name = Path(sys.argv[0]).name
    return "python -m inferkit" if name in ("__main__.py", "-m", "-c", "") else name
