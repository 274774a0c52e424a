"""The HTTP interface of a router: that of an instance, and where instances join and leave."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request

from inferkit.core.errors import RequestError
from inferkit.online.api import make_app
from inferkit.online.errors import BadRequest
from inferkit.online.facts import read_facts
from inferkit.online.router.dispatcher import PairDispatcher
from inferkit.online.service import GenerationService


def make_router_app(
    service: GenerationService,
    dispatcher: PairDispatcher,
    *,
    facts: Mapping[str, Any],
    sampling_defaults: Mapping[str, Any] | None = None,
) -> FastAPI:
    """The application; it shares the event loop of its service."""
    app = make_app(service, facts=facts, sampling_defaults=sampling_defaults)

    @app.post("/instances")
    async def join(request: Request) -> dict[str, Any]:
        """An instance is there; it says so every few seconds."""
        try:
            dispatcher.join(read_facts(await request.json()))
        except RequestError as error:
            raise BadRequest.of(error) from None
        except ValueError as error:
            raise BadRequest(f"this instance cannot be used: {error}") from None
        return {"bootstrap_urls": dispatcher.registry.bootstrap_urls()}

    @app.delete("/instances/{instance_id}")
    async def leave(instance_id: str) -> dict[str, bool]:
        """An instance gets no new request; those that run there go on."""
        return {"left": dispatcher.leave(instance_id)}

    return app
