"""A role of this host as a child process: started, waited for, listened to, stopped."""

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from inferkit.bench.load.client import LoadClient
from inferkit.core.errors import WorkerError
from inferkit.online.cluster.child import Child, ChildSpec, describe_exit
from inferkit.online.cluster.restart import RestartPolicy
from inferkit.online.cluster.runner import quoted

T = TypeVar("T")

READY = re.compile(r"^ready at (http://\S+)")
POLL_INTERVAL_S = 0.05
START_LIMIT_S = 1800.0
STOP_LIMIT_S = 150.0
"""After SIGTERM; a cluster gives its router, then its instances, a part of it."""


class Service:
    """A service that has been started; `during` waits for it to be ready.

    Args:
        tell: gets what it tells its user.
    """

    def __init__(self, spec: ChildSpec, *, tell: Callable[[str], None]) -> None:
        self.url = ""
        """Where it is ready to take requests."""
        self._tell = tell
        self._child = Child(spec, policy=RestartPolicy(), on_line=self._on_line)
        self._is_ready = asyncio.Event()
        self._child.start(time.monotonic())
        self._end = asyncio.create_task(self._watch())

    async def ready(self, limit_s: float, *, num_pairs: int) -> None:
        """Returns when requests are taken by all instances.

        Args:
            num_pairs: of prefill and decode instances of a cluster; 0 = it is none.

        Raises:
            WorkerError: it has ended before, or `limit_s` seconds were not enough.
        """
        try:
            async with asyncio.timeout(limit_s):
                await self.during(self._is_ready.wait())
                if num_pairs:
                    async with LoadClient(self.url, timeout_s=limit_s) as client:
                        await self.during(client.until_all_pairs(num_pairs))
        except TimeoutError:
            raise WorkerError(
                f"{self._child.spec.name} is not ready after {limit_s:g} s; see "
                f"{self._child.spec.log}"
            ) from None

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`.

        Raises:
            WorkerError: the service has ended before; holds its last error.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._end}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self.failure() or WorkerError(f"{self._child.spec.name} has ended by itself")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return task.result()

    def failure(self) -> WorkerError | None:
        """How it has ended, where that is not well; holds its last error."""
        if not self._end.done() or self._end.result() == 0:
            return None
        how = describe_exit(self._end.result())
        spec = self._child.spec
        return WorkerError(
            f"{spec.name} has ended ({how}; log {spec.log}): {self._child.last_error()}"
        )

    async def stop(self) -> None:
        """Ask it to end, and end it where it has not after a while; nothing of it is left."""
        if not self._end.done():
            self._child.terminate()
            await asyncio.wait({self._end}, timeout=STOP_LIMIT_S)
        if not self._end.done():
            self._tell(f"warning: did not end within {STOP_LIMIT_S:g} s and was killed")
            self._child.kill()
        await self._end

    async def _watch(self) -> int:
        """Takes what it prints until it has ended; returns its exit code."""
        while (code := self._child.ended()) is None:
            self._child.read()
            await asyncio.sleep(POLL_INTERVAL_S)
        return code

    def _on_line(self, text: str) -> None:
        found = READY.match(text)
        if found is not None and not self.url:
            self.url = found[1]
            self._is_ready.set()
        self._tell(text)


@contextlib.asynccontextmanager
async def started(
    words: Sequence[str],
    *,
    run_dir: Path,
    log: Path,
    tell: Callable[[str], None],
    num_pairs: int = 0,
    start_limit_s: float = START_LIMIT_S,
) -> AsyncIterator[Service]:
    """A service that takes requests; it is stopped at the end, also after a failure.

    It ends with this process, whatever ends that, and a signal from the terminal does not reach it.

    Args:
        words: `+role=...`, further overrides and flags.
        run_dir: of the service.
        log: gets all that it prints.
        tell: gets what it tells its user, line by line.
        num_pairs: of prefill and decode instances, where it is a cluster.

    Raises:
        WorkerError: it could not be started.
    """
    program = [sys.executable, "-m", "inferkit"]
    command = [*program, *words, f"hydra.run.dir={quoted(str(run_dir.absolute()))}"]
    spec = ChildSpec(name="the service", command=lambda life: command, log=log)
    service = Service(spec, tell=tell)
    try:
        await service.ready(start_limit_s, num_pairs=num_pairs)
        yield service
    finally:
        await service.stop()
