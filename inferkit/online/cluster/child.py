"""One process of a cluster: started, listened to, and ended with everything that it started."""

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from inferkit.online.cluster import with_parent
from inferkit.online.cluster.restart import RestartPolicy

OWN = "inferkit: "
"""How a process of ours begins what it tells its user."""
SHOWN = (OWN, "warning: ")
ERROR_LINES = 20
READ_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """What is started, each time anew where it has ended."""

    name: str
    command: Callable[[int], Sequence[str]]
    """Number of its life (1 = the first) -> program and arguments."""
    log: Path
    """Gets all that it prints, of all its lives."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Beside this process's own environment."""
    stage: int = 0
    """Children of a lower stage are drained first."""


class Child:
    """Args:
    on_line: called with every line that a user should see.
    """

    def __init__(
        self, spec: ChildSpec, *, policy: RestartPolicy, on_line: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.policy = policy
        self.on_line = on_line
        self.num_lives = 0
        self.started_s = 0.0
        self.due_s: float | None = 0.0
        """When its next life begins; None = it runs, or is over."""
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._rest = b""
        self._has_closed = False
        self._is_telling = False
        self._last: deque[str] = deque(maxlen=ERROR_LINES)
        """Since it last told its user something: an error, where it has ended by one."""

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def is_speaking(self) -> bool:
        """Whether more may come from its pipe."""
        return self.is_running and not self._has_closed

    @property
    def pid(self) -> int:
        assert self._process is not None, "only a running child has a process"
        return self._process.pid

    @property
    def pipe(self) -> IO[bytes]:
        assert self._process is not None, "only a running child prints"
        assert self._process.stdout is not None, "its output is a pipe"
        return self._process.stdout

    def start(self, now_s: float) -> None:
        """Begin its next life. Only from the main thread: the child ends with that thread."""
        self.num_lives += 1
        self.started_s, self.due_s = now_s, None
        self._rest, self._has_closed = b"", False
        self._last.clear()
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.spec.log.open("ab")
        shim = [sys.executable, "-I", with_parent.__file__, str(os.getpid())]
        self._process = subprocess.Popen(
            [*shim, *self.spec.command(self.num_lives)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | self.spec.variables,
            # Ctrl-C is this process's business, which drains its children in their order.
            process_group=0,
        )
        os.set_blocking(self.pipe.fileno(), False)

    def read(self) -> None:
        """Take what it has printed; never blocks."""
        while self.is_speaking:
            try:
                data = os.read(self.pipe.fileno(), READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._has_closed = True
                return
            assert self._log is not None, "the log is open while the child runs"
            self._log.write(data)
            self._log.flush()
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._on_line(line.decode("utf-8", "replace").rstrip("\r"))

    def ended(self) -> int | None:
        """Its exit code, once it has ended and what it started is gone too; negative = a signal."""
        if self._process is None:
            return None
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, self.pid, flags) is None:
            return None
        self.read()
        # Before it is reaped: until then its number, and that of its group, is nobody else's.
        self.kill()
        code = self._process.wait()
        self.pipe.close()
        if self._rest:
            self._on_line(self._rest.decode("utf-8", "replace"))
        assert self._log is not None, "the log is open while the child runs"
        self._log.close()
        self._process, self._log = None, None
        return code

    def terminate(self) -> None:
        """Ask it to finish what it does and end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and its own children at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def last_error(self) -> str:
        """What it last told, without blank lines at the end."""
        text = "\n".join(self._last).removeprefix(OWN).rstrip()
        return text or f"it told no reason; see {self.spec.log}"

    def _on_line(self, text: str) -> None:
        if text.startswith(OWN):
            self._last.clear()
        if text.startswith(OWN) or self._last:
            self._last.append(text)
        # What goes on in indented lines is shown whole: where in the code an error was raised.
        self._is_telling = text.startswith(SHOWN) or (self._is_telling and text.startswith("  "))
        if self._is_telling:
            self.on_line(text.removeprefix(OWN))


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
