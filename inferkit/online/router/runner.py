"""What the process of a router does: bind, serve, drain."""

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from inferkit.config.provenance import record
from inferkit.config.schema import InferenceConfig
from inferkit.core.errors import ConfigError, RequestError, WorkerError
from inferkit.core.listening import listening
from inferkit.online.errors import Unavailable
from inferkit.online.runner import DRAIN_SIGNALS, url_of
from inferkit.runtime.secret import read_secret

if TYPE_CHECKING:
    import socket

    from inferkit.online.model_side import ModelSide
    from inferkit.online.router.dispatcher import PairDispatcher
    from inferkit.online.router.server import Router

logger = logging.getLogger(__name__)


class RouterRunner:
    """Serves until it is told to stop (SIGTERM, Ctrl-C).

    Args:
        drain_limit_s: how long running requests may go on after that; a second signal ends them.
    """

    def __init__(self, *, drain_limit_s: float = 60.0) -> None:
        self.drain_limit_s = drain_limit_s
        self._console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)

    def run(self, config: InferenceConfig, *, run_dir: Path) -> dict[str, Any]:
        """Returns when the last request has ended after a signal.

        Raises:
            ConfigError, ModelLoadError: this configuration cannot route here.
        """
        # Web framework and tokenizers are not needed to check a configuration.
        from inferkit.online.model_side import read_model

        router = config.router
        keys = ("router.host", "router.port")
        with listening(router.host, router.port, keys=keys) as listener:
            model = read_model(config)
            url = url_of(listener)
            max_model_len = model.served.max_model_len
            record(run_dir, url=url, max_model_len=max_model_len, pid=os.getpid())
            self._tell(f"router for {model.config.model.name} at {url} (looks for instances)")
            asyncio.run(self._serve(model, listener, url))
        return {}

    async def _serve(self, model: "ModelSide", listener: "socket.socket", url: str) -> None:
        from inferkit.online.facts import Side
        from inferkit.online.http_server import http_server
        from inferkit.online.router.pairs import Policy
        from inferkit.online.router.server import routing

        config = model.config
        router = config.router
        ending = _Ending()
        async with (
            routing(
                model=model.served,
                tokenizer=model.tokenizer,
                prefill_urls=_urls("router.prefill_urls", router.prefill_urls),
                decode_urls=_urls("router.decode_urls", router.decode_urls),
                policy=Policy(router.policy),
                retries=router.retries,
                first_token=Side(router.first_token),
                timeout_s=router.request_timeout_s,
                secret=read_secret(config.disagg),
                sampling_defaults={
                    name: getattr(config.data, name)
                    for name in ("temperature", "top_p", "top_k", "min_p", "seed")
                },
                on_ready=lambda: self._tell(f"ready at {url}"),
            ) as routed,
            http_server(routed.app, listener) as serving,
        ):
            stopping = asyncio.create_task(ending.first.wait())
            failing = asyncio.create_task(_until_failed(routed.dispatcher))
            with ending.on_signals():
                await asyncio.wait(
                    {serving, stopping, failing}, return_when=asyncio.FIRST_COMPLETED
                )
                failing.cancel()
                if serving.done():
                    serving.result()
                    raise WorkerError("the HTTP server has ended by itself")
                if routed.dispatcher.failure is not None:
                    raise WorkerError(str(routed.dispatcher.failure))
                await self._drain(routed, ending)

    async def _drain(self, routed: "Router", ending: "_Ending") -> None:
        routed.service.drain()
        self._tell(
            f"takes no new request; those that run have {self.drain_limit_s:g} s "
            "(a second signal ends them)"
        )
        draining = asyncio.create_task(routed.service.drained(self.drain_limit_s))
        second = asyncio.create_task(ending.second.wait())
        await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        is_drained = draining.done() and draining.result()
        draining.cancel()
        if not is_drained:
            logger.warning("requests that still run are given up")
            routed.dispatcher.fail(Unavailable("the service is shutting down"))

    def _tell(self, text: str) -> None:
        self._console.print(f"inferkit: {text}")


class _Ending:
    """Signals, as events of the loop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def on_signals(self) -> contextlib.ExitStack:
        loop = asyncio.get_running_loop()
        stack = contextlib.ExitStack()
        for number in DRAIN_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal)
                stack.callback(loop.remove_signal_handler, number)
        return stack

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _until_failed(dispatcher: "PairDispatcher") -> None:
    while dispatcher.failure is None:
        await dispatcher.until_changed()


def _urls(key: str, urls: list[str]) -> list[str]:
    from inferkit.online.facts import check_url

    try:
        return [check_url(key, url) for url in urls]
    except RequestError as error:
        raise ConfigError(str(error)) from None
