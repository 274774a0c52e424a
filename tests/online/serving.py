"""A service for tests: the real parent side, and a worker end that speaks the real messages."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import zmq
import zmq.asyncio

from inferkit.core.messages import (
    Abort,
    Generate,
    LoopState,
    MessageReader,
    Output,
    Stop,
    ToWorker,
    WorkerReady,
    encode,
)
from inferkit.core.request import FinishReason, TokenLogprobs
from inferkit.loader.byte_tokenizer import make_byte_tokenizer
from inferkit.online.api import make_app
from inferkit.online.dispatcher import DPDispatcher
from inferkit.online.instance import Instance, ParentAddress
from inferkit.online.probe import probe_ranks
from inferkit.online.service import GenerationService, ServedModel
from inferkit.online.worker_link import WorkerLink

VOCAB_SIZE = 300
MAX_MODEL_LEN = 200
KV_TOTAL = 50
TIMEOUT_S = 60

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine, which must end."""

    async def limited() -> T:
        async with asyncio.timeout(TIMEOUT_S):
            return await work

    return asyncio.run(limited())


@dataclass
class _Running:
    message: Generate
    num_done: int = 0
    is_aborted: bool = False


@dataclass
class EchoWorker:
    """A DP rank whose model repeats its prompt for ever, one token per tick.

    It is driven by a thread, through the sockets of a real worker.
    """

    context: "zmq.Context[zmq.Socket[bytes]]"
    parent: ParentAddress
    dp_rank: int = 0
    tick_s: float = 0.0
    """Pause between ticks."""
    tokens_per_output: int = 1
    received: list[ToWorker] = field(default_factory=list)
    running: dict[tuple[int, int], _Running] = field(default_factory=dict)
    is_silent: bool = False
    """It takes messages and answers nothing."""
    is_over: bool = False

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.is_over = True
        self.thread.join(10)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        link = WorkerLink(context=self.context, parent=self.parent, dp_rank=self.dp_rank)
        link.connect()
        epoch = self.parent.instance.epoch
        reader: MessageReader[ToWorker] = MessageReader(ToWorker, epoch=epoch, peer_epoch=epoch)
        header = self.parent.instance.header
        link.announce(encode(WorkerReady(**header, dp_rank=self.dp_rank)))
        num_ticks = 0
        while not self.is_over:
            for frame in link.receive(0 if self.running else 5):
                message = reader.read(frame)
                assert message is not None
                self._take(message)
            if self.is_silent:
                continue
            outputs = [self._output(key, entry) for key, entry in list(self.running.items())]
            num_ticks += 1
            state = LoopState(
                **header,
                dp_rank=self.dp_rank,
                num_ticks=num_ticks,
                num_steps=num_ticks,
                num_waiting=0,
                num_running=len(self.running),
                kv_used=len(self.running),
                kv_total=KV_TOTAL,
            )
            link.send([encode(message) for message in (*outputs, state)])
            if self.tick_s:
                time.sleep(self.tick_s)
        link.close()

    def _take(self, message: ToWorker) -> None:
        self.received.append(message)
        if isinstance(message, Generate):
            self.running[message.key] = _Running(message)
        elif isinstance(message, Abort) and message.key in self.running:
            self.running[message.key].is_aborted = True
        elif isinstance(message, Stop):
            self.is_over = True

    def _output(self, key: tuple[int, int], entry: _Running) -> Output:
        header = {**self.parent.instance.header, "room": key[0], "attempt": key[1]}
        if entry.is_aborted:
            del self.running[key]
            return Output(**header, index=entry.num_done, finish_reason=FinishReason.ABORT)
        prompt, sampling = entry.message.token_ids, entry.message.sampling
        if len(prompt) > KV_TOTAL:
            del self.running[key]
            return Output(
                **header,
                index=0,
                finish_reason=FinishReason.REFUSED,
                finish_detail=f"{len(prompt)} tokens do not fit",
            )
        index, limit = entry.num_done, sampling.max_tokens or 0
        count = min(self.tokens_per_output, limit - index)
        tokens = [prompt[i % len(prompt)] for i in range(index, index + count)]
        entry.num_done += count
        reason = None
        if entry.num_done >= limit:
            reason = FinishReason.LENGTH
            del self.running[key]
        logprobs = []
        if sampling.logprobs is not None:
            top = ((tokens[0], -0.5), (65, float("-inf")))[: sampling.logprobs]
            logprobs = [TokenLogprobs(token, -0.5, 1, top) for token in tokens]
        return Output(
            **header,
            index=index,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            num_cached_tokens=1,
        )


@dataclass
class Served:
    """What a test talks to."""

    client: httpx.AsyncClient
    service: GenerationService
    workers: list[EchoWorker]

    @property
    def dispatcher(self) -> DPDispatcher:
        return self.service.dispatcher

    def generates(self) -> list[Generate]:
        """Requests that arrived at workers; probes are left out."""
        received = [message for worker in self.workers for message in worker.received]
        return [m for m in received if isinstance(m, Generate) and m.request_id != "probe"]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that happens in another thread."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def dispatching(dp_size: int = 1, **options: Any) -> AsyncIterator[Any]:
    """A started dispatcher, the address of its sockets, and a context for workers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    instance = Instance.draw("serve")
    dispatcher = DPDispatcher(
        instance=instance,
        dp_size=dp_size,
        clock=options.pop("clock", time.monotonic),
        request_url=f"inproc://requests-{instance.epoch}",
        output_url=f"inproc://outputs-{instance.epoch}",
        context=zmq.asyncio.Context(shadow=context),
    )
    parent = await dispatcher.start()
    try:
        yield dispatcher, parent, context
    finally:
        await dispatcher.close()
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def serving(
    *,
    dp_size: int = 1,
    probes: bool = True,
    default_max_tokens: int = 0,
    timeout_s: float = 60.0,
    tokenizer: Any = None,
    **worker: Any,
) -> AsyncIterator[Served]:
    """Everything of the parent but its threads, over sockets inside this process."""
    async with dispatching(dp_size) as (dispatcher, parent, context):
        service = GenerationService(
            dispatcher=dispatcher,
            tokenizer=tokenizer or make_byte_tokenizer(VOCAB_SIZE),
            model=ServedModel(
                name="echo",
                path="models/echo",
                vocab_size=VOCAB_SIZE,
                max_model_len=MAX_MODEL_LEN,
                default_max_tokens=default_max_tokens,
            ),
            timeout_s=timeout_s,
            prober=lambda: probe_ranks(dispatcher),
        )
        workers = [EchoWorker(context, parent, dp_rank=rank, **worker) for rank in range(dp_size)]
        for entry in workers:
            entry.start()
        app = make_app(service, facts={"role": "serve"}, sampling_defaults={"temperature": 0.0})
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        try:
            if probes:
                await service.probe()
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                yield Served(client, service, workers)
        finally:
            for entry in workers:
                entry.stop()
            service.close()
