"""The parent's event loop in a thread of its own: HTTP, dispatcher, probe, watchdog, drain.

The main thread supervises the workers meanwhile; it calls in by the methods of `ServerThread`.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI

from inferkit.online.api import make_app
from inferkit.online.dispatcher import DPDispatcher
from inferkit.online.errors import GenerationFailed, ServiceError, Unavailable
from inferkit.online.http_server import http_server
from inferkit.online.instance import Instance, ParentAddress
from inferkit.online.leg_role import LegRole, LegSide
from inferkit.online.probe import probe_ranks
from inferkit.online.service import GenerationService, ServedModel

logger = logging.getLogger(__name__)

START_LIMIT_S = 60.0
CLOSE_LIMIT_S = 10.0
WATCH_INTERVAL_S = 0.5


class ServerThread:
    """HTTP answers from `start` on; requests are taken once every DP rank has generated.

    Args:
        listener: bound and listening.
        on_ready: called in the server's thread when requests are taken.
        on_trouble: called in the server's thread with what makes the instance useless although
            its workers live.
        watchdog_s: a loop without a sign for so long is taken for dead.
        leg_role: of an instance that computes one half of requests, for routers; None = clients
            talk to this one.
        beside: entered in the server's event loop before HTTP answers, left at its end.
    """

    def __init__(
        self,
        *,
        instance: Instance,
        model: ServedModel,
        tokenizer: Any,
        dp_size: int,
        listener: socket.socket,
        zmq_host: str,
        zmq_port: int,
        secret: bytes,
        timeout_s: float,
        watchdog_s: float,
        facts: Mapping[str, Any],
        sampling_defaults: Mapping[str, Any],
        on_ready: Callable[[], None],
        on_trouble: Callable[[str], None],
        leg_role: LegRole | None = None,
        beside: AbstractAsyncContextManager[Any] | None = None,
    ) -> None:
        self.instance = instance
        self.model = model
        self.tokenizer = tokenizer
        self.dp_size = dp_size
        self.listener = listener
        self.zmq_host = zmq_host
        self.zmq_port = zmq_port
        self.secret = secret
        self.timeout_s = timeout_s
        self.watchdog_s = watchdog_s
        self.facts = facts
        self.sampling_defaults = sampling_defaults
        self.on_ready = on_ready
        self.on_trouble = on_trouble
        self.leg_role = leg_role
        self.beside = beside
        self._started: Future[ParentAddress] = Future()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._dispatcher: DPDispatcher | None = None
        self._service: GenerationService | None = None
        self._leg_side: LegSide | None = None

    # -- called by the main thread -------------------------------------------------------------

    def start(self) -> ParentAddress:
        """Returns where workers find this parent.

        Raises:
            zmq.ZMQError: the sockets for the workers cannot be bound.
        """
        self._thread.start()
        return self._started.result(START_LIMIT_S)

    @property
    def is_ready(self) -> bool:
        return self._service is not None and self._service.state == "ready"

    def drain(self, limit_s: float, then: Callable[[], None]) -> None:
        """Take no new request, let those that run end, stop the workers, call `then`."""
        assert self._loop is not None, "start() comes first"
        asyncio.run_coroutine_threadsafe(self._drain(limit_s, then), self._loop)

    def fail(self, error: ServiceError) -> None:
        """The workers are gone: requests that run get this error, new ones are refused."""
        self._call(lambda service: service.dispatcher.fail(error))

    def close(self) -> None:
        """Let answers that are under way out, then end the thread."""
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_LIMIT_S)

    def _call(self, work: Callable[[GenerationService], None]) -> None:
        service = self._service
        if self._loop is not None and service is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(work, service)

    # -- in the server's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            if not self._started.done():
                self._started.set_exception(error)
                return
            logger.exception("the server failed")
            self.on_trouble(f"the HTTP server failed: {error}")

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        dispatcher = DPDispatcher(
            instance=self.instance,
            dp_size=self.dp_size,
            clock=time.monotonic,
            host=self.zmq_host,
            port=self.zmq_port,
            secret=self.secret,
        )
        leg_role = self.leg_role
        service = GenerationService(
            dispatcher=dispatcher,
            tokenizer=self.tokenizer,
            model=self.model,
            timeout_s=self.timeout_s,
            # One half of a request cannot be tried alone: routers try pairs.
            prober=None if leg_role else lambda: probe_ranks(dispatcher),
        )
        address = await dispatcher.start()
        self._dispatcher, self._service = dispatcher, service
        tasks = [
            asyncio.create_task(self._probe(service)),
            asyncio.create_task(self._watch(service, dispatcher)),
        ]
        app = self._app(service, dispatcher)
        try:
            async with (
                self.beside or contextlib.nullcontext(),
                http_server(app, self.listener) as serving,
                self._leg_side or contextlib.nullcontext(),
            ):
                self._started.set_result(address)
                stopping = asyncio.create_task(self._stop.wait())
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not self._stop.is_set():
                    serving.result()
                    raise Unavailable("it has ended by itself")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await dispatcher.close()
            service.close()

    def _app(self, service: GenerationService, dispatcher: DPDispatcher) -> FastAPI:
        if self.leg_role is None:
            return make_app(service, facts=self.facts, sampling_defaults=self.sampling_defaults)
        self._leg_side = LegSide(
            self.leg_role,
            instance=self.instance,
            dispatcher=dispatcher,
            service=service,
            model=self.model.name,
        )
        return self._leg_side.app(self.facts)

    async def _probe(self, service: GenerationService) -> None:
        try:
            await service.probe()
        except ServiceError as error:
            if service.dispatcher.failure is None:
                self.on_trouble(f"the first generation failed: {error}")
            return
        if self._leg_side is not None:
            self._leg_side.on_change()
        self.on_ready()

    async def _watch(self, service: GenerationService, dispatcher: DPDispatcher) -> None:
        while dispatcher.failure is None:
            await asyncio.sleep(WATCH_INTERVAL_S)
            silent = dispatcher.silent_ranks(self.watchdog_s)
            if silent:
                limit = f"{self.watchdog_s:g} s"
                cause = f"the loop of DP rank {silent[0]} has not ticked for {limit}"
                dispatcher.fail(GenerationFailed(cause))
        if not service.is_draining:
            self.on_trouble(str(dispatcher.failure))

    async def _drain(self, limit_s: float, then: Callable[[], None]) -> None:
        service, dispatcher = self._service, self._dispatcher
        assert service is not None and dispatcher is not None, "only a started server drains"
        service.drain()
        if self._leg_side is not None:
            await self._leg_side.leave()
        if not await service.drained(limit_s):
            logger.warning("requests still run after %g s; they are given up", limit_s)
            dispatcher.fail(Unavailable("the service is shutting down"))
        dispatcher.stop_workers()
        then()
