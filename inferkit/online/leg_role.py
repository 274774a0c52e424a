"""What an instance is to routers: where it is found, what it says of itself, whom it joins."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from inferkit.online.bootstraps import KnownBootstraps
from inferkit.online.dispatcher import DPDispatcher
from inferkit.online.facts import InstanceFacts, Side
from inferkit.online.instance import Instance
from inferkit.online.join import RouterLink
from inferkit.online.leg_app import make_leg_app
from inferkit.online.legs import LegServer
from inferkit.online.router_signature import RouterSignatures
from inferkit.online.service import GenerationService


@dataclass(frozen=True, kw_only=True)
class LegRole:
    """Of a prefill or decode instance."""

    side: Side
    url: str
    """Under which routers reach its HTTP interface."""
    bootstrap_url: str = ""
    """Under which decode instances reach the bootstrap server of a prefill instance."""
    bootstrap_urls: tuple[str, ...] = ()
    """Of prefill instances that the configuration of a decode instance lists."""
    router_url: str | None = None
    """A router to join."""
    secret: bytes = b""
    """That legs and joins are signed with."""


class LegSide:
    """The parts of an instance that deal with routers; they live in its event loop.

    As a context it is a member of its router.
    """

    def __init__(
        self,
        role: LegRole,
        *,
        instance: Instance,
        dispatcher: DPDispatcher,
        service: GenerationService,
        model: str,
    ) -> None:
        self.role = role
        self.instance = instance
        self.service = service
        self.model = model
        self.bootstraps = KnownBootstraps(role.bootstrap_urls)
        self.link: RouterLink | None = None
        signatures = RouterSignatures(role.secret)
        if role.router_url:
            self.link = RouterLink(
                router_url=role.router_url,
                facts=self.facts,
                learn=self.bootstraps.learn,
                signatures=signatures,
            )
            self.bootstraps.ask = self.link.ask
        self.legs = LegServer(
            side=role.side,
            instance=instance,
            dispatcher=dispatcher,
            bootstraps=self.bootstraps,
            is_draining=lambda: service.is_draining,
            signatures=signatures,
        )

    def app(self, facts: Mapping[str, Any]) -> FastAPI:
        return make_leg_app(
            self.service,
            legs=self.legs,
            instance_facts=self.facts,
            facts=facts,
            router_url=self.role.router_url,
        )

    def facts(self) -> InstanceFacts:
        """As they are now."""
        return InstanceFacts(
            url=self.role.url,
            side=self.role.side,
            instance_id=self.instance.instance_id,
            epoch=self.instance.epoch,
            state=self.service.state,
            bootstrap_url=self.role.bootstrap_url,
            model=self.model,
        )

    async def __aenter__(self) -> "LegSide":
        """Join the router, once HTTP answers."""
        if self.link is not None:
            self.link.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.link is not None:
            await self.link.close()

    def on_change(self) -> None:
        """The state has another name now."""
        if self.link is not None:
            self.link.wake()

    async def leave(self) -> None:
        """Get no new leg from the router."""
        if self.link is not None:
            await self.link.leave()
