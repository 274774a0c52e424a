"""Finds prefill instances for a decode rank, and notices when one is gone.

One thread asks all bootstrap servers that are watched, each on its own, so that one that hangs
delays no other. What was learned goes to the owner by callbacks, in that thread.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import anyio
import httpx

from inferkit.core.errors import InferkitError
from inferkit.core.protocols import Clock
from inferkit.kv_transfer.heartbeat import Heartbeat
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.rank_mapping import PrefillServerInfo
from inferkit.kv_transfer.route import (
    HEALTH_PATH,
    MAX_BODY_BYTES,
    ROUTE_PATH,
    RouteError,
    read_health,
    read_route,
    refusal_text,
    url_fault,
)
from inferkit.kv_transfer.signature import HttpSignatures
from inferkit.kv_transfer.watched_routes import WatchedRoutes

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0
CLOSE_LIMIT_S = 5.0
A = TypeVar("A")


class ScoutFailed(InferkitError):
    """The thread has ended by a fault of its own or of a callback; no peer is watched any more."""


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: str
    text: str


class Scout:
    """Watches the bootstrap servers of prefill instances.

    Args:
        on_route: a complete route, at first sight and whenever it has changed. A restarted
            instance comes here as another peer, after `on_lost` of the former one.
        on_lost: that peer does not answer any more, or another has its place; once.
        on_found: a lost peer answers again.
        interval_s: between two probes of a server whose route is known; sooner while a request
            waits for one.
        misses: in a row, after which a peer is lost.
        probe_timeout_s: for one answer as a whole, however it trickles in.
        secret: shared by all instances; empty = nothing is signed (loopback only).
    """

    def __init__(
        self,
        *,
        on_route: Callable[[PrefillServerInfo], None],
        on_lost: Callable[[Peer], None],
        on_found: Callable[[Peer], None],
        interval_s: float = 5.0,
        misses: int = 3,
        clock: Clock = time.monotonic,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
        secret: bytes = b"",
    ) -> None:
        self.probe_timeout_s = probe_timeout_s
        self.routes = WatchedRoutes(
            heartbeat=Heartbeat(interval_s=interval_s, num_misses=misses, clock=clock),
            on_route=on_route,
            on_lost=on_lost,
            on_found=on_found,
            clock=clock,
        )
        self._signatures = HttpSignatures(secret=secret)
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, Peer | None], None] = {}
        """What was watched since the thread last looked."""
        self._settled: dict[str, Peer] = {}
        """Replaced as a whole by the thread."""
        self._failure: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="scout", daemon=True)

    # -- called by the owner ---------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._main_task = self._loop.create_task(self._main())
        self._thread.start()

    def close(self) -> None:
        """No callback comes after it."""
        if self._loop is None or self._main_task is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._main_task.cancel)
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            logger.warning("the scout has not ended within %g s", CLOSE_LIMIT_S)

    def watch(self, url: str, peer: Peer | None = None) -> None:
        """A request needs the prefill instance behind this bootstrap server.

        Never waits; called for every request, and again while it waits for long: a server that
        nobody has watched for ten minutes is forgotten. May be called by any thread.

        Args:
            peer: the life that the request is pinned to. Where another one is known, the server
                is asked at once instead of at the next interval.

        Raises:
            ScoutFailed: nobody would look.
        """
        if self._failure is not None:
            raise ScoutFailed(f"the scout has ended: {self._failure}") from self._failure
        url = url.rstrip("/")
        known = self._settled.get(url)
        with self._lock:
            wakes = (known is None or peer not in (None, known)) and (url, peer) not in self._asked
            self._asked[url, peer] = None
        if wakes and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._wake.set)

    def stats(self) -> dict[str, int]:
        """Plain numbers: servers watched, instances reachable, probes that failed by cause."""
        return self.routes.stats()

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._loop is not None and self._main_task is not None
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main_task)
        except ExceptionGroup as errors:  # of the task group; the next watch() tells the owner
            logger.exception("the scout failed")
            self._failure = errors.exceptions[0]
        finally:
            self._loop.close()

    async def _main(self) -> None:
        await anyio.sleep(0)  # loads what the first request would wait for
        # Proxies of the environment are for the outside world. A connection per probe: a server
        # that was restarted in between is another one.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(trust_env=False, timeout=None, limits=limits) as client,
            asyncio.TaskGroup() as probes,
        ):
            while True:
                self._wake.clear()
                with self._lock:
                    self._settled = self.routes.settled()
                    asked, self._asked = self._asked, {}
                for url, peer in asked:
                    self.routes.watch(url, peer)
                for url in self.routes.due():
                    probes.create_task(self._probe(client, url))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.routes.heartbeat.seconds_to_next()):
                        await self._wake.wait()

    async def _probe(self, client: httpx.AsyncClient, url: str) -> None:
        if self.routes.known(url) is not None:
            health = await self._ask(client, url, HEALTH_PATH, read_health)
            if isinstance(health, _Fault):
                self.routes.missed(url, health.kind, health.text)
            elif self.routes.answered(url, health):
                await self._probe_route(client, url)
        else:
            await self._probe_route(client, url)
        self._wake.set()

    async def _probe_route(self, client: httpx.AsyncClient, url: str) -> None:
        found = await self._ask(client, url, ROUTE_PATH, read_route)
        if not isinstance(found, _Fault):
            self.routes.has_route(url, found)
        elif found.kind == "incomplete":
            self.routes.lacks_ranks(url, found.text)
        else:
            self.routes.missed(url, found.kind, found.text)

    async def _ask(
        self, client: httpx.AsyncClient, url: str, path: str, read: Callable[[bytes], A]
    ) -> A | _Fault:
        """One question; whatever a stranger may answer ends as a fault."""
        if fault := url_fault(url):
            return _Fault("no_url", fault)
        headers = self._signatures.request_headers("GET", path)
        # Nothing is compressed: a small answer could become any amount of memory.
        headers["accept-encoding"] = "identity"
        body = bytearray()
        try:
            async with (
                asyncio.timeout(self.probe_timeout_s),
                client.stream("GET", url + path, headers=headers) as response,
            ):
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        return _Fault("malformed", f"{path} has more than {MAX_BODY_BYTES} bytes")
        except TimeoutError:
            return _Fault("timeout", f"no answer within {self.probe_timeout_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return _Fault("unreachable", f"{type(error).__name__}: {error}")
        return self._judge(path, response, bytes(body), read)

    def _judge(
        self, path: str, response: httpx.Response, body: bytes, read: Callable[[bytes], A]
    ) -> A | _Fault:
        status = response.status_code
        text = refusal_text(status, body)
        given = response.headers.get(HttpSignatures.HEADER, "")
        if status == 401:
            return _Fault("refused", text)
        if not self._signatures.is_answer_valid(given, path, status, body):
            return _Fault("unsigned", "its answer is not signed with the secret of this instance")
        if status == 503 and path == ROUTE_PATH:
            return _Fault("incomplete", text)
        if status != 200:
            return _Fault("status", text)
        try:
            return read(body)
        except RouteError as error:
            return _Fault("malformed", str(error))
