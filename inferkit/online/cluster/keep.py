"""Keeps commands alive, for launchers: restarts with back-off, one log each, signals passed on.

    python -m inferkit.online.cluster.keep LOG_DIR NAME PROGRAM ARGUMENTS... [++ NAME PROGRAM ...]

A command that ends by itself with 0 after a signal, or that cannot start, ends all. The first is
drained first. With `--dry-run` as the first word they are shown, and those of inferkit checked.
"""

import itertools
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from inferkit.config.faults import Command
from inferkit.config.preflight import preflight
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import WorkerError
from inferkit.online.cluster.child import ChildSpec
from inferkit.online.cluster.supervisor import Supervisor

SEPARATOR = "++"
DRY_RUN = "--dry-run"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(words: Sequence[str]) -> int:
    """Returns the exit code."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    is_dry = list(words[:1]) == [DRY_RUN]
    log_dir, *rest = words[is_dry:] or [""]
    commands = _commands(rest)
    if not commands or any(len(command) < 2 for command in commands):
        console.print(f"keep: LOG_DIR NAME PROGRAM ARGUMENTS... [{SEPARATOR} NAME PROGRAM ...]")
        return EXIT_USAGE
    if is_dry:
        shown = Console(soft_wrap=True, highlight=False, markup=False)
        for name, *command in commands:
            shown.print(f"{name}: {shlex.join(command)}")
        faults = [text for name, *command in commands for text in _faults(name, command)]
        for text in faults:
            console.print(text)
        return EXIT_USAGE if faults else 0
    specs = [_spec(words, Path(log_dir), stage) for stage, words in enumerate(commands)]
    console.print(f"inferkit: {', '.join(spec.name for spec in specs)}; logs in {log_dir}")
    try:
        Supervisor(specs, tell=console.print).run()
    except WorkerError as error:
        console.print(f"inferkit: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _faults(name: str, command: Sequence[str]) -> Iterator[str]:
    """What the pre-flight check of a command would say; nothing of another program."""
    if list(command[1:3]) != ["-m", "inferkit"]:
        return
    shown = Command(program=shlex.join(command[:3]), overrides=tuple(command[3:]))
    message = preflight(shown, ConfigSpace()).message
    if message:
        yield f"{name}: {message}"


def _spec(words: Sequence[str], log_dir: Path, stage: int) -> ChildSpec:
    name, *command = words
    log = log_dir / f"{name}.log"
    return ChildSpec(name=name, command=lambda life: command, log=log, stage=stage)


def _commands(words: Sequence[str]) -> list[list[str]]:
    groups = itertools.groupby(words, lambda word: word == SEPARATOR)
    return [list(group) for is_separator, group in groups if not is_separator]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
