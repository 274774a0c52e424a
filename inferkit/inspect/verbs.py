"""The verbs of the command line: commands beside a run. Each is a module of its own.

A verb's module has

    USAGE                       the text of `inferkit VERB --help`
    add_options(parser)         declares flags of its own, where it has any
    run(arguments) -> int       carries the command out; returns the exit code. ConfigError,
                                UsageError and what Hydra raises are told by the caller, exit code 2
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from inferkit.config.arguments import AddOptions, Arguments


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A verb; its module is imported when it is used."""

    text: str
    """What it does, in a line of `--help`."""
    module: str
    """Dotted name."""

    @property
    def usage(self) -> str:
        text: str = importlib.import_module(self.module).USAGE
        return text

    @property
    def add_options(self) -> AddOptions | None:
        found: AddOptions | None = getattr(
            importlib.import_module(self.module), "add_options", None
        )
        return found

    def run(self, arguments: Arguments) -> int:
        function: Callable[[Arguments], int] = importlib.import_module(self.module).run
        return function(arguments)


VERBS: Mapping[str, Verb] = {
    "check": Verb(
        text="check a configuration and show what it comes to, without running it",
        module="inferkit.inspect.check",
    ),
    "explain": Verb(
        text="show where values come from, whom they overrode, and what follows from them",
        module="inferkit.inspect.explain",
    ),
    "diff": Verb(
        text="show how two configurations, runs or git revisions differ",
        module="inferkit.inspect.diff.verb",
    ),
    "replay": Verb(
        text="run what a folder has recorded again, and compare the tokens",
        module="inferkit.inspect.replay",
    ),
    "resume": Verb(
        text="run those cells of a sweep that are missing, and sum all of them up",
        module="inferkit.inspect.resume",
    ),
    "report": Verb(
        text="write one HTML file of a run or a sweep, to be read, sent or printed",
        module="inferkit.inspect.report.verb",
    ),
}
