"""Tells a router that this instance is there, again and again, and when it leaves.

The router answers with the bootstrap addresses of all prefill instances that it knows.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from inferkit.core.messages import DECODE_ERRORS
from inferkit.online.facts import InstanceFacts
from inferkit.online.router_signature import RouterSignatures

logger = logging.getLogger(__name__)

INSTANCES_PATH = "/instances"
INTERVAL_S = 5.0
RETRY_S = 1.0
"""While the router is not there."""
LIMIT_S = 3.0
ASK_INTERVAL_S = 0.2
"""However many requests ask, the router is asked so often."""


class RouterLink:
    """Joins a router, and learns from it.

    Args:
        router_url: `http://host:port`.
        facts: of this instance, as it is now.
        learn: called with the bootstrap addresses that the router knows.
        signatures: what the router wants to see.
    """

    def __init__(
        self,
        *,
        router_url: str,
        facts: Callable[[], InstanceFacts],
        learn: Callable[[list[str]], None],
        signatures: RouterSignatures | None = None,
    ) -> None:
        self.router_url = router_url.rstrip("/")
        self.facts = facts
        self.learn = learn
        self.signatures = signatures or RouterSignatures()
        self.trouble = ""
        """Why the last join failed; "" = it has joined."""
        self._http = httpx.AsyncClient(trust_env=False, verify=False, timeout=LIMIT_S)
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._has_left = False
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = float("-inf")

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Leave, and undo `start`."""
        await self.leave()
        await self._http.aclose()

    def wake(self) -> None:
        """Something has changed: say so now."""
        self._wake.set()

    async def ask(self) -> None:
        """Join now, to learn what the router knows; callers that come together ask once."""
        if self._asking is None or self._asking.done():
            now_s = asyncio.get_running_loop().time()
            if now_s - self._asked_s < ASK_INTERVAL_S:
                return
            self._asked_s = now_s
            self._asking = asyncio.create_task(self._join())
        await asyncio.shield(self._asking)

    async def leave(self) -> None:
        """Get no new request; a router that is not there need not hear it."""
        if self._has_left:
            return
        self._has_left = True
        for task in (self._task, self._asking):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        path = f"{INSTANCES_PATH}/{self.facts().instance_id}"
        headers = self.signatures.headers("DELETE", path)
        try:
            await self._http.delete(f"{self.router_url}{path}", headers=headers)
        except httpx.HTTPError as error:
            logger.warning("the router at %s was not told of the end: %s", self.router_url, error)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            await self._join()
            try:
                async with asyncio.timeout(RETRY_S if self.trouble else INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _join(self) -> None:
        trouble = ""
        try:
            body = msgspec.json.encode(self.facts().to_json())
            headers = self.signatures.headers("POST", INSTANCES_PATH, body)
            response = await self._http.post(
                f"{self.router_url}{INSTANCES_PATH}", content=body, headers=headers
            )
            if response.status_code == 200:
                answer: Any = msgspec.json.decode(response.content)
                self.learn([str(url) for url in answer["bootstrap_urls"]])
            else:
                trouble = f"status {response.status_code}: {response.text[:500]}"
        except httpx.HTTPError as error:
            trouble = str(error) or type(error).__name__
        except (*DECODE_ERRORS, KeyError, TypeError) as error:
            trouble = f"its answer is none of a router: {error!r}"
        if trouble and trouble != self.trouble:
            logger.warning("router at %s: %s; trying again", self.router_url, trouble)
        elif not trouble and self.trouble:
            logger.info("router at %s: joined", self.router_url)
        self.trouble = trouble
