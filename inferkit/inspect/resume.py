"""The verb `resume`: run what is missing of a sweep."""

from pathlib import Path

from inferkit.config.arguments import Arguments, UsageError
from inferkit.sweep.start import resume_sweep

USAGE = """\
Run what is missing of a sweep.

Usage: inferkit resume DIR [FLAGS] [KEY=VALUE ...]

Runs the cells of the sweep in the folder DIR that have not ended ok, and sums all of them up. A
cell that has ended ok is run again only where something has changed that decides what it computes:
its configuration, the code, or the files of the model or the data set. Ports, addresses and paths
do not count.

The command is that of the sweep, run where it was started; each KEY=VALUE takes the place of one
with the same key. An axis may have got more values: cells keep their results under new numbers.
Folders that are not needed any more go to DIR/earlier. A sweep whose cells span several nodes
cannot be resumed. A search (as with Optuna) that is finished stays as it is; any other begins anew:
its trials go to DIR/earlier, and their results come back where it tries the same values again.

  inferkit resume outputs/sweeps/2026-01-31/12-00-00-1
  inferkit resume outputs/sweeps/2026-01-31/12-00-00-1 scheduler.batch_size=1,8,32,64

Exit code: 0 = all cells have ended ok, 1 = some have not, 2 = nothing was started,
130 = Ctrl-C."""


def run(arguments: Arguments) -> int:
    words = arguments.overrides
    if not words or ("=" in words[0] and not Path(words[0]).is_dir()):
        raise UsageError(
            "resume needs the folder of a sweep as its first word, such as "
            "outputs/sweeps/2026-01-31/12-00-00-1"
        )
    return resume_sweep(Path(words[0]), words[1:], arguments.flags)
