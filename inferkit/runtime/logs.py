"""Logging: of rank processes, which inherit no handlers, and of libraries; without secrets."""

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from inferkit.core.secrets import hide


class HidingFormatter(logging.Formatter):
    """What `inner` makes of a record, its traceback too, with secrets hidden."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self.inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return hide(self.inner.format(record))


def hide_in_logs() -> None:
    """Have the handlers that are there now, of all loggers, hide secrets."""
    known = logging.getLogger().manager.loggerDict.values()
    loggers = [logging.getLogger(), *(one for one in known if isinstance(one, logging.Logger))]
    for handler in (handler for logger in loggers for handler in logger.handlers):
        if not isinstance(handler.formatter, HidingFormatter):
            handler.setFormatter(HidingFormatter(handler.formatter or logging.Formatter()))


class HidingStream(io.TextIOBase):
    """A text stream that writes to `inner` with secrets hidden."""

    def __init__(self, inner: TextIO) -> None:
        self.inner = inner

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.inner.encoding

    @property
    def buffer(self) -> BinaryIO:
        return self.inner.buffer

    def write(self, text: str) -> int:
        self.inner.write(hide(text))
        return len(text)

    def flush(self) -> None:
        self.inner.flush()

    def fileno(self) -> int:
        return self.inner.fileno()

    def isatty(self) -> bool:
        return self.inner.isatty()

    def writable(self) -> bool:
        return True


@contextlib.contextmanager
def hidden_output() -> Iterator[None]:
    """Meanwhile secrets are hidden in what this process prints, tracebacks too."""
    out, err = HidingStream(sys.stdout), HidingStream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def log_to_file(path: Path, *, rank: int, level: str) -> None:
    """Send this process's log to a file of the run directory, each line with its rank."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(
        logging.Formatter(f"[rank{rank}] %(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    hide_in_logs()
    root.setLevel(level)
    quiet_libraries()


def log_run(path: Path, *, level: str) -> None:
    """Log a run that Hydra does not drive as Hydra would: to the terminal and to a file."""
    logging.basicConfig(
        format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s",
        level=level.upper(),
        handlers=[logging.StreamHandler(), logging.FileHandler(path, encoding="utf-8")],
        force=True,
    )
    hide_in_logs()


def quiet_libraries() -> None:
    """What libraries say of every request or file is not for this program's log."""
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "matplotlib", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
