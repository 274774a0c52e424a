"""What ranks, and the processes that they start, print: into files, with secrets hidden on the way.

A rank hides secrets in its own prints and logs. A child process of a component of the user's, or a
library in C, writes to the descriptors themselves: these are pipes, which the parent reads.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from inferkit.core.secrets import hide, unfinished

STREAMS = ("stdout", "stderr")
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 16
"""A longer line is written in parts."""

Writers = Mapping[int, tuple[str, ...]]
"""Rank -> paths of the ends that it writes to, in the order of STREAMS. By name, for no more than
256 descriptors can be handed to a new process, whose ranks are many."""


class RankOutput:
    """Reads what the ranks of this node write, until `close`.

    Args:
        log_dir: gets `rank<r>.stdout.log` and `rank<r>.stderr.log`.
    """

    def __init__(self, log_dir: Path, ranks: Sequence[int]) -> None:
        self._files: dict[Connection, HiddenFile] = {}
        self._writers: list[Connection] = []
        """Open until the end: a rank opens its own later, if at all."""
        self.writers: dict[int, tuple[str, ...]] = {}
        for rank in ranks:
            pipes = [Pipe(duplex=False) for _ in STREAMS]
            self._writers += [writer for _, writer in pipes]
            self.writers[rank] = tuple(
                f"/proc/{os.getpid()}/fd/{writer.fileno()}" for _, writer in pipes
            )
            for stream, (reader, _) in zip(STREAMS, pipes, strict=True):
                self._files[reader] = HiddenFile(log_dir / f"rank{rank}.{stream}.log")
                os.set_blocking(reader.fileno(), False)
        self._stopped, self._stop = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._read, name="rank output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """To be called when the ranks have ended: what is in the pipes is written, no more."""
        self._stop.close()
        self._thread.join()
        for end in (self._stopped, *self._writers, *self._files):
            end.close()
        for file in self._files.values():
            file.close()

    def _read(self) -> None:
        """Until `close`, and then what was left; a child that lives on may keep an end open."""
        ready: list[Any] = []
        while self._stopped not in ready:
            ready = connection.wait([*self._files, self._stopped])
            for reader in [one for one in ready if one in self._files]:
                self._take(reader)
        for reader in self._files:
            self._take(reader)  # one read takes all that a pipe holds

    def _take(self, reader: Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            self._files[reader].write(os.read(reader.fileno(), READ_BYTES))


class HiddenFile:
    """A file that gets whole lines, with secrets hidden; also those that span several lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rest = b""

    def write(self, data: bytes) -> None:
        self._rest += data
        end = max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r")) + 1
        if not end and len(self._rest) > MAX_LINE_BYTES:
            end = len(self._rest)
        text = self._rest[:end].decode(errors="surrogateescape")
        text = text[: len(text) - unfinished(text)]
        self._rest = self._rest[len(text.encode(errors="surrogateescape")) :]
        self._append(text)

    def close(self) -> None:
        """Write what is left: a line without an end."""
        rest, self._rest = self._rest, b""
        self._append(rest.decode(errors="surrogateescape"))

    def _append(self, text: str) -> None:
        """A full disk must not end the run, nor what waits for the pipe."""
        if text:
            with contextlib.suppress(OSError), self.path.open("ab") as file:
                file.write(hide(text).encode(errors="surrogateescape"))


def write_to(writers: Writers, rank: int) -> None:
    """Have this process, a rank, and all that it starts write to its ends."""
    for descriptor, path in zip((1, 2), writers[rank], strict=True):
        (sys.stdout if descriptor == 1 else sys.stderr).flush()
        end = os.open(path, os.O_WRONLY)
        os.dup2(end, descriptor)
        os.close(end)
