"""The HTTP interface of a prefill or decode instance: legs for routers, and what it is."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from inferkit.online.api import add_error_handlers, add_ready_and_stats
from inferkit.online.errors import BadRequest
from inferkit.online.facts import InstanceFacts
from inferkit.online.legs import LegServer
from inferkit.online.middleware import RequestIds
from inferkit.online.service import GenerationService

FOR_ROUTERS = ("/generate", "/abort", "/v1/{rest:path}")
METHODS = ["GET", "POST"]


def make_leg_app(
    service: GenerationService,
    *,
    legs: LegServer,
    instance_facts: Callable[[], InstanceFacts],
    facts: Mapping[str, Any],
    router_url: str | None = None,
) -> FastAPI:
    """The application; it shares the event loop of its service.

    Args:
        instance_facts: of this instance, as it is now.
        facts: further ones, for /stats.
        router_url: where clients find a router, if that is known.
    """
    app = FastAPI(title="inferkit", docs_url=None, redoc_url=None)
    app.add_middleware(RequestIds)
    add_error_handlers(app)
    add_ready_and_stats(app, service, facts)
    legs.add_to(app)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, Any]:
        """The process lives, and says what it is."""
        return {"status": "ok", **instance_facts().to_json()}

    async def elsewhere(request: Request) -> Response:
        where = f"the router at {router_url}" if router_url else "the router"
        raise BadRequest(
            f"{request.url.path}: this {legs.side} instance computes one half of requests; send "
            f"them to {where}"
        )

    for path in FOR_ROUTERS:
        app.add_api_route(path, elsewhere, methods=METHODS, include_in_schema=False)
    return app
