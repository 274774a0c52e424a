"""The verb `diff`: how two configurations differ, and what follows from it."""

import argparse
from collections.abc import Callable, Mapping

from inferkit.config.arguments import Arguments, UsageError
from inferkit.core.errors import ConfigError
from inferkit.core.exit_codes import EXIT_FAILED, EXIT_OK
from inferkit.inspect.diff.as_json import as_json
from inferkit.inspect.diff.compare import Comparison, compare
from inferkit.inspect.diff.markdown import as_markdown
from inferkit.inspect.diff.revisions import take_revisions
from inferkit.inspect.diff.sources import take_sides
from inferkit.inspect.diff.text import as_text
from inferkit.inspect.snapshot import Snapshot

USAGE = """\
Usage: inferkit diff [FLAGS] A B
       inferkit diff [FLAGS] '+role=cluster ...'
       inferkit diff [FLAGS] --base REVISION [--head REVISION] [KEY=VALUE ...]

Shows how two configurations differ: group choices, keys with the place that set each value, what
follows from them (ranks of every group, shares of a rank, KV blocks), rules that either breaks, and
of two runs the metrics. A and B are, each,

  a run directory          outputs/2026-01-31/12-00-00-000000
  a YAML file              config.resolved.yaml, or one with some keys; the others have defaults
  overrides in quotes      '+role=prefill parallel=tp16'; '' is the defaults

Of a prefill and a decode it says whether one can hand KV over to the other; a cluster alone is
compared within. With --base the same overrides are composed by the code of two git revisions.

  --base REVISION          a commit, branch or tag of this checkout: side A
  --head REVISION          side B; without it, the code as it is now
  --format FORMAT          text (the default), markdown for a review, or json

  inferkit diff parallel=tp16 parallel=dp8tp2
  inferkit diff '' '+role=prefill parallel=tp16'
  inferkit diff --base HEAD~1 --format markdown +role=decode

Exit code: 0 = no difference that has an effect, 1 = they differ, 2 = they cannot be compared, as
where one does not compose."""

DEFAULTS = "the defaults"

FORMATS: Mapping[str, Callable[[Comparison], str]] = {
    "text": as_text,
    "markdown": as_markdown,
    "json": as_json,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base")
    parser.add_argument("--head")
    parser.add_argument("--format", choices=FORMATS, default="text")


def run(arguments: Arguments) -> int:
    """Compare, and print the comparison.

    Raises:
        ConfigError, UsageError: there is nothing to compare.
    """
    options = arguments.options
    if arguments.is_multirun:
        raise UsageError("diff compares single configurations; leave -m out")
    if options.base is not None:
        left, right = take_revisions(options.base, options.head, arguments)
    elif options.head is not None:
        raise UsageError("--head is compared with --base; give --base REVISION too")
    else:
        left, right = take_sides(arguments.overrides, arguments.space())
    _require_composed(left, right)
    comparison = compare(left, right)
    print(FORMATS[options.format](comparison))
    return EXIT_FAILED if comparison.has_effect else EXIT_OK


def _require_composed(left: Snapshot, right: Snapshot) -> None:
    """A side without some of its overrides is not what the user named.

    Raises:
        ConfigError: a side does not compose.
    """
    blocks = []
    for letter, side in (("A", left), ("B", right)):
        if side.left_out:
            faults = [f"  {line.strip()}" for text in side.left_out for line in text.splitlines()]
            blocks += [f"{letter} does not compose: {side.title or DEFAULTS}", *faults]
    if blocks:
        raise ConfigError("\n".join(["the two cannot be compared", *blocks]))
