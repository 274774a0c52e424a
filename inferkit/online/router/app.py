"""The HTTP interface of a router: that of an instance, and where instances join and leave."""

import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
from fastapi import FastAPI
from starlette.requests import Request

from inferkit.core.errors import RequestError
from inferkit.core.messages import DECODE_ERRORS
from inferkit.online.api import make_app
from inferkit.online.errors import BadRequest
from inferkit.online.facts import InstanceFacts, read_facts
from inferkit.online.join import INSTANCES_PATH
from inferkit.online.router.dispatcher import PairDispatcher
from inferkit.online.router_signature import HEADER, RouterSignatures, Unsigned
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

    def check_sender(request: Request, body: bytes = b"") -> None:
        """Clients may reach this interface too, and who joins is sent what they ask."""
        path = request.url.path
        signed.check(request.headers.get(HEADER, ""), request.method, path, body)
        if not signed.is_on and not _is_of_this_host(request):
            raise Unsigned(
                f"{path}: instances of other hosts join and leave with a signature only; give the "
                "router and them one secret (disagg.secret_env), or list them in "
                "router.prefill_urls and router.decode_urls"
            )

    @app.post(INSTANCES_PATH)
    async def join(request: Request) -> dict[str, Any]:
        """An instance is there; it says so every few seconds."""
        body = await request.body()
        check_sender(request, body)
        try:
            facts = read_facts(msgspec.json.decode(body))
            _check_reach(request, facts)
            dispatcher.join(facts)
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
        check_sender(request)
        return {"left": dispatcher.leave(instance_id)}

    return app


def _is_of_this_host(request: Request) -> bool:
    """A process of this host that connects to one of its own addresses has the same itself."""
    server = request.scope.get("server")
    host = "" if request.client is None else request.client.host
    return _is_loopback(host) or (server is not None and host == server[0])


def _check_reach(request: Request, facts: InstanceFacts) -> None:
    """Raises:
    RequestError: an instance of another host names an address that only that host reaches.
    """
    if _is_of_this_host(request) or request.client is None:
        return
    for field in ("url", "bootstrap_url"):
        url = getattr(facts, field)
        if url and _is_loopback(urlsplit(url).hostname or ""):
            raise RequestError(
                f"{field}={url} is an address of your own host only, and you are at "
                f"{request.client.host}; list the addresses of the instance's nodes in "
                f"disagg.{facts.side}_ips"
            )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name; and what a proxy says of a client need not be an address
        return False
