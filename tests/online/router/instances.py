"""Small instances for a router under test: real HTTP on loopback, answers that the test scripts."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from inferkit.core.listening import listening
from inferkit.core.messages import Generate, Output, encode
from inferkit.core.request import FinishReason, TokenLogprobs
from inferkit.loader.byte_tokenizer import make_byte_tokenizer
from inferkit.online.facts import InstanceFacts, Side
from inferkit.online.http_server import http_server
from inferkit.online.leg_frames import pack_frame
from inferkit.online.router.server import Router, routing
from inferkit.online.runner import url_of
from inferkit.online.service import ServedModel

MAX_MODEL_LEN = 200
VOCAB_SIZE = 300
PROBE = "probe"


@dataclass(eq=False)
class Leg:
    """A leg that has come in, and how it went."""

    message: Generate
    is_closed: bool = False
    """The router has closed the connection before its end."""
    is_over: bool = False
    num_sent: int = 0

    @property
    def is_probe(self) -> bool:
        return self.message.request_id == PROBE


Script = Callable[["FakeInstance", Leg], AsyncIterator[Output] | Response]


@dataclass(eq=False)
class FakeInstance:
    """Repeats the prompt, as its pair would; `script` overrides what it does with a leg."""

    side: Side
    port: int = 0
    epoch: int = field(default_factory=lambda: secrets.randbits(64))
    instance_id: str = ""
    state: str = "ready"
    script: Script | None = None
    tick_s: float = 0.0
    legs: list[Leg] = field(default_factory=list)
    url: str = ""
    is_dead: bool = False
    is_hanging: bool = False
    """It takes connections and answers nothing."""
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    def __post_init__(self) -> None:
        self.instance_id = self.instance_id or f"{self.side}-{secrets.token_hex(4)}"

    @property
    def facts(self) -> InstanceFacts:
        is_prefill = self.side is Side.PREFILL
        return InstanceFacts(
            url=self.url,
            side=self.side,
            instance_id=self.instance_id,
            epoch=self.epoch,
            state=self.state,
            bootstrap_url=f"http://127.0.0.1:1{self.epoch % 9000 + 1000}" if is_prefill else "",
        )

    def requests(self) -> list[Leg]:
        """Legs of clients."""
        return [leg for leg in self.legs if not leg.is_probe]

    async def __aenter__(self) -> "FakeInstance":
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        listener = listening("127.0.0.1", self.port)
        self.url = url_of(listener)
        self.port = int(self.url.rpartition(":")[2])
        self._stack.enter_context(listener)
        await self._stack.enter_async_context(http_server(self._app(), listener))

    async def stop(self) -> None:
        self.is_dead = True
        await self._stack.aclose()

    async def restart(self) -> "FakeInstance":
        """Another process at the same address."""
        await self.stop()
        successor = FakeInstance(self.side, port=self.port, tick_s=self.tick_s)
        await successor.start()
        return successor

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> dict[str, Any]:
            while self.is_hanging and not self.is_dead:
                await asyncio.sleep(0.01)
            return self.facts.to_json()

        @app.post("/leg")
        async def leg(request: Request) -> Response:
            try:
                body = await request.body()
            except ClientDisconnect:  # the other leg was faster than this one's arrival
                return Response(status_code=499)
            message = msgspec.msgpack.decode(body, type=Generate)
            entry = Leg(message)
            self.legs.append(entry)
            if message.peer_epoch != self.epoch:
                return error(503, "another life", "other_epoch")
            answer = (self.script or echo)(self, entry)
            if isinstance(answer, Response):
                return answer
            return StreamingResponse(self._frames(entry, answer))

        return app

    async def _frames(self, leg: Leg, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        try:
            async for output in outputs:
                if self.is_dead:
                    return
                yield pack_frame(encode(output))
                leg.num_sent += 1
            leg.is_over = True
        finally:
            leg.is_closed = not leg.is_over


def error(status: int, text: str, code: str | None = None) -> Response:
    body = {"error": {"message": text, "type": "test", "param": None, "code": code}}
    return JSONResponse(body, status_code=status)


def output(instance: FakeInstance, leg: Leg, **fields: Any) -> Output:
    header = {
        "instance_id": instance.instance_id,
        "epoch": instance.epoch,
        "peer_epoch": leg.message.epoch,
        "room": leg.message.room,
        "attempt": leg.message.attempt,
    }
    return Output(**(header | fields))


async def echo(instance: FakeInstance, leg: Leg) -> AsyncIterator[Output]:
    """The prompt again and again; prefill has the first token only."""
    message = leg.message
    prompt, limit = message.token_ids, message.sampling.max_tokens or 0
    has_logprobs = message.sampling.logprobs is not None
    num_tokens = 1 if instance.side is Side.PREFILL else limit
    for index in range(num_tokens):
        token = prompt[index % len(prompt)]
        is_last = index + 1 == num_tokens
        yield output(
            instance,
            leg,
            index=index,
            token_ids=[token],
            logprobs=[TokenLogprobs(token, -0.5, 1, ())] if has_logprobs else [],
            finish_reason=FinishReason.LENGTH if is_last else None,
            num_cached_tokens=1 if instance.side is Side.PREFILL else 0,
        )
        await asyncio.sleep(instance.tick_s)


def for_clients(script: Script) -> Script:
    """Probes are answered well."""
    return lambda instance, leg: (echo if leg.is_probe else script)(instance, leg)


def refusing(status: int, text: str, code: str | None = None) -> Script:
    return for_clients(lambda instance, leg: error(status, text, code))


def ending(reason: FinishReason, detail: str = "", after: int = 0) -> Script:
    """Ends for this reason after so many tokens."""

    async def script(instance: FakeInstance, leg: Leg) -> AsyncIterator[Output]:
        async for entry in echo(instance, leg):
            if entry.index >= after:
                break
            yield entry
        yield output(instance, leg, index=after, finish_reason=reason, finish_detail=detail)

    return for_clients(script)


def breaking(after: int = 0) -> Script:
    """The connection ends without an end after so many tokens."""

    async def script(instance: FakeInstance, leg: Leg) -> AsyncIterator[Output]:
        async for entry in echo(instance, leg):
            if entry.index >= after:
                return
            yield entry

    return for_clients(script)


async def silence(instance: FakeInstance, leg: Leg) -> AsyncIterator[Output]:
    while not instance.is_dead:
        await asyncio.sleep(0.01)
    return
    yield output(instance, leg, index=0)  # what makes it an iterator


silent = for_clients(silence)


@dataclass
class Routed:
    """What a test talks to."""

    client: httpx.AsyncClient
    router: Router
    url: str

    @property
    def service(self) -> Any:
        return self.router.service

    @property
    def dispatcher(self) -> Any:
        return self.router.dispatcher

    async def generate(self, prompt: Any = "abc", **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 4, **fields}
        return await self.client.post("/generate", json=body)

    async def pairs_proven(self, count: int) -> None:
        await until(
            lambda: sum(p["breaker"] == "closed" for p in self.dispatcher.pairs.stats()) == count
        )


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def router_of(
    *instances: FakeInstance, proven: int | None = None, **options: Any
) -> AsyncIterator[Routed]:
    """A router over real HTTP; its listed instances are the started ones.

    Args:
        proven: pairs to wait for (None = all).
    """
    urls = {side: [i.url for i in instances if i.side is side] for side in Side}
    async with routing(
        model=ServedModel(
            name="echo", path=None, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN
        ),
        tokenizer=make_byte_tokenizer(VOCAB_SIZE),
        prefill_urls=options.pop("prefill_urls", urls[Side.PREFILL]),
        decode_urls=options.pop("decode_urls", urls[Side.DECODE]),
        sampling_defaults={"temperature": 0.0},
        **options,
    ) as router:
        with listening("127.0.0.1", 0) as listener:
            url = url_of(listener)
            async with (
                http_server(router.app, listener),
                httpx.AsyncClient(
                    base_url=url, timeout=60, trust_env=False, verify=False
                ) as client,
            ):
                routed = Routed(client, router, url)
                if proven is None:
                    proven = len(urls[Side.PREFILL]) * len(urls[Side.DECODE])
                await routed.pairs_proven(proven)
                yield routed


@contextlib.asynccontextmanager
async def instances(num_prefill: int, num_decode: int) -> AsyncIterator[list[FakeInstance]]:
    """Started ones, prefill first; what a test starts in their place it stops itself."""
    sides = [Side.PREFILL] * num_prefill + [Side.DECODE] * num_decode
    fakes = [FakeInstance(side) for side in sides]
    try:
        await asyncio.gather(*(fake.start() for fake in fakes))
        yield fakes
    finally:
        await asyncio.gather(*(fake.stop() for fake in fakes))


def dead_url() -> str:
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
