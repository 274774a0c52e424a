"""Asks every known instance what it is, again and again, and at once when there is a reason."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import msgspec

from inferkit.core.errors import RequestError
from inferkit.core.messages import DECODE_ERRORS
from inferkit.kv_transfer.identity import Peer
from inferkit.online.facts import read_facts
from inferkit.online.router.registry import Registry

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
SEARCH_INTERVAL_S = 0.5
"""For an instance that takes no requests."""
LIMIT_S = 3.0
SWEEP_INTERVAL_S = 1.0


class Poller:
    """One task per address.

    Args:
        on_change: called after each look, with the peers that are gone.
        spawn: starts a task whose failure is its owner's.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        on_change: Callable[[list[Peer]], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.registry = registry
        self.on_change = on_change
        self.spawn = spawn
        self._http = httpx.AsyncClient(trust_env=False, verify=False, timeout=LIMIT_S)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wakes: dict[str, asyncio.Event] = {}
        self._sweeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sweeping = self.spawn(self._sweep())
        self.follow()

    async def close(self) -> None:
        tasks = [task for task in (*self._tasks.values(), self._sweeping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    def follow(self) -> None:
        """Ask those that the registry knows now, and no others."""
        urls = set(self.registry.urls)
        for url in self._tasks.keys() - urls:
            self._tasks.pop(url).cancel()
            del self._wakes[url]
        for url in urls - self._tasks.keys():
            self._wakes[url] = asyncio.Event()
            self._tasks[url] = self.spawn(self._watch(url, self._wakes[url]))

    def wake(self, url: str) -> None:
        """Ask this one now."""
        if url in self._wakes:
            self._wakes[url].set()

    async def _watch(self, url: str, wake: asyncio.Event) -> None:
        while True:
            wake.clear()
            self.on_change(await self._ask(url))
            interval_s = INTERVAL_S if self.registry.is_usable(url) else SEARCH_INTERVAL_S
            try:
                async with asyncio.timeout(interval_s):
                    await wake.wait()
            except TimeoutError:
                continue

    async def _ask(self, url: str) -> list[Peer]:
        try:
            response = await self._http.get(f"{url}/health")
            if response.status_code != 200:
                raise RequestError(f"GET /health has answered with status {response.status_code}")
            facts = read_facts(msgspec.json.decode(response.content), url=url)
        except httpx.TimeoutException:
            self.registry.missed(url, f"no answer within {LIMIT_S:g} s", is_definite=False)
        except httpx.HTTPError as error:
            text = str(error) or f"its connection broke ({type(error).__name__})"
            self.registry.missed(url, text, is_definite=True)
        except (RequestError, *DECODE_ERRORS) as error:
            self.registry.missed(url, f"it is no instance: {error}", is_definite=True)
        else:
            return self.registry.answered(url, facts)
        return []

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self.on_change(self.registry.sweep())
