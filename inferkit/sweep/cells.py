"""Results of jobs: one JSON file each."""

import json
import signal
import traceback
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from inferkit.config.provenance import write_json
from inferkit.core.errors import AddressError, RequestError

RESULT_FILE = "result.json"
LOG_FILE = "cell.log"
"""What the process of a cell prints."""
OK, FAILED, INTERRUPTED = "ok", "failed", "interrupted"
TIMEOUT, INVALID = "timeout", "invalid"
"""Of cells: ended at sweep.cell_timeout_s; not run, for its configuration has faults."""


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """How one job ended."""

    number: int
    """Of the cell in its sweep; 0 for a single run."""
    overrides: tuple[str, ...]
    status: str = FAILED
    seconds: float = 0.0
    error: str | None = None
    """First line of what went wrong."""
    traceback: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    run_key: str | None = None
    """Of a cell: what it has computed, by inferkit.config.identity."""

    def failed(self, error: BaseException) -> "JobResult":
        text = str(error).strip() or type(error).__name__
        return replace(
            self,
            status=FAILED,
            error=text.splitlines()[0],
            # Nothing in the code is to blame for a port that is taken, or a prompt.
            traceback=None
            if isinstance(error, AddressError | RequestError)
            else "".join(traceback.format_exception(error)),
        )

    def interrupted(self, error: KeyboardInterrupt | SystemExit) -> "JobResult":
        """By the signal that the exception stands for: a SystemExit has 128 + its number."""
        codes = {128 + signum: signum.name for signum in signal.Signals}
        code = error.code if isinstance(error, SystemExit) else 128 + signal.SIGINT
        name = codes.get(code, "") if isinstance(code, int) else ""
        return replace(self, status=INTERRUPTED, error=f"ended by {name or 'its own exit'}")

    def write(self, run_dir: Path) -> None:
        write_json(run_dir / RESULT_FILE, asdict(self))


def read_result(run_dir: Path) -> JobResult | None:
    """What a job has left in its folder; None where that is nothing, or nothing of this program."""
    try:
        values = json.loads((run_dir / RESULT_FILE).read_text("utf-8"))
        known = {name.name: values[name.name] for name in fields(JobResult) if name.name in values}
        return JobResult(**known | {"overrides": tuple(known["overrides"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def cells_text(num: int) -> str:
    """`1 cell`, `12 cells`."""
    return f"{num} {'cell' if num == 1 else 'cells'}"
