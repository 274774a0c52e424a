"""Everything of a router but its process: HTTP, dispatcher and service in one event loop."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from inferkit.core.protocols import Clock
from inferkit.online.facts import Side
from inferkit.online.instance import Instance
from inferkit.online.router.app import make_router_app
from inferkit.online.router.dispatcher import PairDispatcher
from inferkit.online.router.pairs import Policy
from inferkit.online.router.registry import Registry
from inferkit.online.router_signature import RouterSignatures
from inferkit.online.service import GenerationService, ServedModel


@dataclass(frozen=True, kw_only=True)
class Router:
    """A router that works."""

    instance: Instance
    dispatcher: PairDispatcher
    service: GenerationService
    app: FastAPI


@contextlib.asynccontextmanager
async def routing(
    *,
    model: ServedModel,
    tokenizer: Any,
    prefill_urls: Sequence[str] = (),
    decode_urls: Sequence[str] = (),
    policy: Policy = Policy.HASH,
    retries: int = 1,
    first_token: Side = Side.DECODE,
    timeout_s: float = 1800.0,
    sampling_defaults: Mapping[str, Any] | None = None,
    secret: bytes = b"",
    clock: Clock = time.monotonic,
    on_ready: Callable[[], None] = lambda: None,
) -> AsyncIterator[Router]:
    """A router that looks for its instances while the context is open; its application is to be
    served by the caller.

    Args:
        secret: that legs and joins are signed with.
        on_ready: called once a pair has generated.
    """
    instance, signatures = Instance.draw("router"), RouterSignatures(secret)
    registry = Registry(
        prefill_urls=prefill_urls, decode_urls=decode_urls, clock=clock, model=model.name
    )
    dispatcher = PairDispatcher(
        instance=instance,
        registry=registry,
        clock=clock,
        policy=policy,
        retries=retries,
        first_token=first_token,
        signatures=signatures,
    )
    service = GenerationService(
        dispatcher=dispatcher, tokenizer=tokenizer, model=model, timeout_s=timeout_s, clock=clock
    )
    facts = {
        "instance_id": instance.instance_id,
        "role": "router",
        "model": model.name,
        "max_model_len": model.max_model_len,
        "policy": str(policy),
        "pid": os.getpid(),
    }
    app = make_router_app(
        service,
        dispatcher,
        facts=facts,
        sampling_defaults=sampling_defaults,
        signatures=signatures,
    )
    dispatcher.start()
    probing = asyncio.create_task(_probe(service, on_ready))
    try:
        yield Router(instance=instance, dispatcher=dispatcher, service=service, app=app)
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
        await dispatcher.close()
        service.close()


async def _probe(service: GenerationService, on_ready: Callable[[], None]) -> None:
    await service.probe()
    on_ready()
