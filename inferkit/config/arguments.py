"""The words of a command line: Hydra's flags, overrides, and what is wrong with the rest."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.utils import get_args_parser

from inferkit.config.faults import Command, closest, did_you_mean
from inferkit.config.keys import leaf_keys, similar_keys
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
    config_dir = Path(found.config_dir) if found.config_dir else None
    if config_dir is not None and not config_dir.is_dir():
        raise UsageError(f"--config-dir {config_dir}: there is no such folder")
    return Arguments(
        overrides=tuple(found.overrides),
        flags=tuple(_flags(found)),
        is_multirun=found.multirun,
        shows=shows,
        config_dir=config_dir,
        conf_dir=Path(found.config_path).resolve() if found.config_path else CONF_DIR,
        config_name=found.config_name or CONFIG_NAME,
        options=options,
    )


def own_flags(add_options: AddOptions | None) -> list[str]:
    """Flags of a verb's own."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    if add_options is not None:
        add_options(parser)
    return _flags_of(parser)


def _flags_of(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


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
    if guess is None:
        key = name.lstrip("-").replace("-", "_")
        known = similar_keys(key, list(leaf_keys(ConfigSpace().compose_job())))
        return (
            f"{name} is no flag; options are written KEY=VALUE, "
            f"for example {known[0] if known else key}={value or 'VALUE'} "
            "(python -m inferkit --cfg job lists all keys)"
        )
    return f"{name} is no flag{did_you_mean(guess)}"


def program_name() -> str:
    """How this process was started, as a user would type it."""
    name = Path(sys.argv[0]).name
    return "python -m inferkit" if name in ("__main__.py", "-m", "-c", "") else name
