"""The verb `check`: what a configuration comes to, without running it."""

import sys
import time

from inferkit.config.arguments import Arguments, program_name
from inferkit.config.preflight import CHECK, preflight
from inferkit.core.exit_codes import EXIT_OK, EXIT_REFUSED
from inferkit.inspect.summary import summary
from inferkit.runtime.launched import REFUSAL_GRACE_S, find_launched

USAGE = """\
Usage: inferkit check [FLAGS] [KEY=VALUE ...]

Looks for every fault of a command line without starting anything, and shows what the
configuration comes to: groups of ranks, heads, experts, weights and KV cache of a rank. With -m
every cell of the sweep is checked. No device and no weights are needed.

Exit code: 0 = no fault, 2 = faults, each with a command line that works."""


def run(arguments: Arguments) -> int:
    """The pre-flight, and what the configuration comes to; told by rank 0."""
    command = arguments.command(program_name(), CHECK)
    verdict = preflight(command, arguments.space())
    launched = find_launched()
    if launched is not None and launched.rank != 0:
        if verdict.is_good:
            return EXIT_OK
        time.sleep(REFUSAL_GRACE_S)  # rank 0 must come to say why
        return EXIT_REFUSED
    if not verdict.is_good:
        print(verdict.message, file=sys.stderr)
        return EXIT_REFUSED
    for warning in verdict.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if verdict.notice:
        print(verdict.notice, file=sys.stderr)
    print(f"ok: {command}")
    if verdict.is_multirun:
        cells = verdict.probes or verdict.cells
        num_good = len(cells) - len(verdict.invalid)
        are = "none of them has a fault" if not verdict.invalid else f"{num_good} of them can run"
        what = "edges of the search" if verdict.probes else "cells"
        print(f"  {len(cells)} {what}, {are}")
    else:
        print(summary(verdict.checked[0]))
    return EXIT_OK
