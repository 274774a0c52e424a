"""What went wrong in a run of several ranks: as events, and which of them is the cause."""

import re
import signal
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferkit.core.error_place import shown_path, told_with_place
from inferkit.core.errors import ComponentError, InferkitError, WorkerError

PEER_GRACE_S = 3.0
"""A rank that fails because another is gone stays so long: the other's end is to be seen first."""
PEER_LOSS = re.compile(
    r"gloo/transport/\S+ .*(Connection|Read error|Write error|Timed out|Socket)"
    r"|Connection (reset|closed) by peer|Connection was likely closed|Broken pipe"
    r"|client socket has (failed|timed out)|remote process exited",
    re.IGNORECASE,
)
"""How the backends word that another process does not answer any more."""


class PeerLostError(WorkerError):
    """Another rank, which is named, has ended before the run has."""


def is_peer_loss(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, PeerLostError):
        return True
    if isinstance(error, ComponentError) and error.__cause__ is not None:
        return is_peer_loss(error.__cause__)
    return isinstance(error, RuntimeError) and PEER_LOSS.search(str(error)) is not None


def error_event(error: Exception) -> dict[str, Any]:
    """What a rank reports of its failure."""
    is_lost, is_user_error = is_peer_loss(error), isinstance(error, InferkitError)
    # What only says that another rank is gone is nothing to look at.
    has_traceback = not is_lost and not (is_user_error and not isinstance(error, ComponentError))
    is_plain = is_lost or is_user_error
    return {
        "event": "error",
        "message": str(error) or type(error).__name__ if is_plain else told_with_place(error),
        "is_user_error": is_user_error,
        "is_peer_loss": is_lost,
        "traceback": "".join(traceback.format_exception(error)) if has_traceback else "",
    }


def cause_of_end(
    errors: Mapping[int, dict[str, Any]],
    dead: Mapping[int, int],
    *,
    is_alone: bool,
    log_dir: Path,
) -> WorkerError | None:
    """The cause among what ranks reported and with which exit codes they ended; None = all is well.

    A rank that ended without a word comes first (the others can only have noticed it), then the
    first that failed by itself, then those that lost another rank, best one that names it.

    Args:
        errors: rank -> event, in order of arrival.
        dead: rank -> exit code.
        is_alone: there is one rank, which need not be named.
        log_dir: what ranks printed is there.
    """
    for rank, exitcode in dead.items():
        if rank not in errors:
            return WorkerError(
                f"rank {rank} ended without a result: {_how_it_ended(exitcode)}; "
                f"its output is under {log_dir}"
            )
    if not errors:
        return None
    rank, event = min(errors.items(), key=lambda item: _distance(item[1]))
    return worker_error(rank, event, is_alone=is_alone, log_dir=log_dir)


def _distance(event: Mapping[str, Any]) -> int:
    """How far an error is from the cause: it is itself, names the lost rank, or only lost one."""
    if not event["is_peer_loss"]:
        return 0
    return 1 if event["is_user_error"] else 2


def worker_error(
    rank: int, event: Mapping[str, Any], *, is_alone: bool, log_dir: Path
) -> WorkerError:
    """A rank's failure as it is told: its message, and where its traceback is, if there is one.

    The error has the traceback in a note, for the log of this process.
    """
    if event["is_peer_loss"] and not event["is_user_error"]:
        detail = event["message"].splitlines()[0]
        return WorkerError(
            f"rank {rank} lost the connection to another rank, which has ended or cannot be "
            f"reached; if that is on another node, the terminal there tells why ({detail}; "
            f"the output of this node's ranks is under {log_dir})"
        )
    prefix = "" if is_alone or event["is_peer_loss"] else f"rank {rank}: "
    if not event["traceback"]:
        return WorkerError(f"{prefix}{event['message']}")
    log = _log_of(rank, log_dir)
    error = WorkerError(f"{prefix}{event['message']}\n  {where_traceback(log)}")
    error.add_note(f"rank {rank}:\n{event['traceback']}")
    return error


def where_traceback(log: Path) -> str:
    """The line that tells where more is."""
    return f"the whole traceback is in {shown_path(str(log))}"


def _log_of(rank: int, log_dir: Path) -> Path:
    """What a rank has logged; before it begins a log, that goes to its standard error."""
    places = [folder / f"rank{rank}.log" for folder in (log_dir, log_dir.parent)]
    return next((place for place in places if place.exists()), log_dir / f"rank{rank}.stderr.log")


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    hint = " (out of memory?)" if -exitcode == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
