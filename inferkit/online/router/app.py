"""The HTTP interface of a router: that of an instance, and where instances join and leave."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request

from inferkit.core.errors import RequestError
from inferkit.core.messages import DECODE_ERRORS
from inferkit.online.api import make_app
from inferkit.online.errors import BadRequest
from inferkit.online.facts import read_facts
from inferkit.online.join import INSTANCES_PATH
from inferkit.online.router.dispatcher import PairDispatcher
from inferkit.online.router_signature import HEADER, RouterSignatures
from inferkit.online.service import GenerationService


def make_router_app(
    service: GenerationService,
    dispatcher: PairDispatcher,
    *,
    facts: Mapping[str, Any],
    sampling_defaults: Mapping[str, Any] | None = None,
    signatures: RouterSignatures | None = None,
) -> FastAPI:
    """The application; it shares the event loop of its service.

    Args:
        signatures: what instances that join and leave must show.
    """
    signed = signatures or RouterSignatures()
    app = make_app(service, facts=facts, sampling_defaults=sampling_defaults)

    @app.post(INSTANCES_PATH)
    async def join(request: Request) -> dict[str, Any]:
        """An instance is there; it says so every few seconds."""
        body = await request.body()
        signed.check(request.headers.get(HEADER, ""), "POST", INSTANCES_PATH, body)
        try:
            dispatcher.join(read_facts(msgspec.json.decode(body)))
        except RequestError as error:
            raise BadRequest.of(error) from None
        except DECODE_ERRORS as error:
            raise BadRequest(f"the body is no JSON: {error}") from None
        except ValueError as error:
            raise BadRequest(f"this instance cannot be used: {error}") from None
        return {"bootstrap_urls": dispatcher.registry.bootstrap_urls()}

    @app.delete(INSTANCES_PATH + "/{instance_id}")
    async def leave(request: Request, instance_id: str) -> dict[str, bool]:
        """An instance gets no new request; those that run there go on."""
        given = request.headers.get(HEADER, "")
        signed.check(given, "DELETE", f"{INSTANCES_PATH}/{instance_id}")
        return {"left": dispatcher.leave(instance_id)}

    return app
