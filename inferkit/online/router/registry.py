"""Which instances there are, and which take requests. Pure; what is seen comes from outside.

An instance is known by its address: listed in the configuration, or joined by itself. What it is
now, it says at /health and with every join. A process that is restarted at the same address is
another peer at once.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from inferkit.core.messages import PROTOCOL_VERSION
from inferkit.core.protocols import Clock
from inferkit.kv_transfer.identity import Peer
from inferkit.online.facts import READY, InstanceFacts, Side

logger = logging.getLogger(__name__)

EXPIRY_S = 15.0
"""An instance that has joined says so every 5 s; three times nothing, and it has left."""
LOST_S = 15.0
"""Without an answer, a heartbeat or a token for so long, what runs there is given up."""
MAX_MISSES = 3
"""Questions without an answer in time; a refused connection counts at once."""


@dataclass(kw_only=True)
class _Place:
    """An address, and what lives there."""

    url: str
    side: Side
    is_listed: bool
    facts: InstanceFacts | None = None
    is_reachable: bool = False
    num_misses: int = 0
    last_error: str = "not asked yet"
    last_sign_s: float = 0.0
    joined_s: float | None = None
    """Of the last join."""

    @property
    def is_usable(self) -> bool:
        return self.facts is not None and self.is_reachable and self.facts.state == READY

    @property
    def trouble(self) -> str:
        """Why it takes no request; "" where it does."""
        if self.is_usable:
            return ""
        if self.facts is None or not self.is_reachable:
            return self.last_error or "it does not answer"
        return f"it is {self.facts.state}"


class Registry:
    """Args:
    prefill_urls, decode_urls: of instances that are always asked for.
    model: that the router tokenises for; "" = any.
    """

    def __init__(
        self,
        *,
        prefill_urls: Iterable[str],
        decode_urls: Iterable[str],
        clock: Clock,
        model: str = "",
    ) -> None:
        self.clock = clock
        self.model = model
        self._places: dict[str, _Place] = {}
        for side, urls in ((Side.PREFILL, prefill_urls), (Side.DECODE, decode_urls)):
            for url in urls:
                self._places[url.rstrip("/")] = _Place(
                    url=url.rstrip("/"), side=side, is_listed=True, last_sign_s=clock()
                )

    # -- what is seen: each returns the peers that are gone because of it ------------------------

    def join(self, facts: InstanceFacts) -> list[Peer]:
        """An instance says that it is there; repeated while it is.

        Raises:
            ValueError: it cannot work with this router, or its address is taken by the other side.
        """
        fault = self._misfit(facts)
        place = self._places.get(facts.url)
        if place is not None and place.side is not facts.side:
            fault = f"{facts.url} is known as a {place.side} instance, not as {facts.side}"
        if fault:
            raise ValueError(fault)
        gone = self._elsewhere(facts)
        if place is None:
            place = self._places[facts.url] = _Place(
                url=facts.url, side=facts.side, is_listed=False
            )
            logger.info("%s instance %s joins at %s", facts.side, facts.instance_id, facts.url)
        place.joined_s = place.last_sign_s = self.clock()
        is_new = place.facts is None or place.facts.peer != facts.peer
        gone += self._replace(place, facts)
        if is_new:
            place.is_reachable, place.num_misses, place.last_error = True, 0, ""
        return gone

    def leave(self, instance_id: str) -> bool:
        """An instance takes no request any more; what runs there goes on."""
        for place in self._places.values():
            if place.facts is not None and place.facts.instance_id == instance_id:
                logger.info("%s instance %s leaves", place.side, instance_id)
                self._forget(place, "it has left")
                return True
        return False

    def answered(self, url: str, facts: InstanceFacts) -> list[Peer]:
        """An instance has said what it is."""
        place = self._places.get(url)
        if place is None:
            return []
        fault = self._misfit(facts)
        if facts.side is not place.side:
            fault = f"it is a {facts.side} instance; the router takes it for {place.side}"
        place.last_sign_s = self.clock()
        if fault:
            gone = [place.facts.peer] if place.facts is not None else []
            place.facts, place.is_reachable, place.last_error = None, False, fault
            return gone
        gone = [*self._elsewhere(facts), *self._replace(place, facts)]
        place.is_reachable, place.num_misses, place.last_error = True, 0, ""
        return gone

    def missed(self, url: str, error: str, *, is_definite: bool) -> None:
        """No answer. `is_definite` = nobody listens there, as opposed to a late answer."""
        place = self._places.get(url)
        if place is None:
            return
        place.num_misses += 1
        if is_definite or place.num_misses >= MAX_MISSES or place.facts is None:
            if place.is_reachable:
                logger.warning("%s instance at %s is not reachable: %s", place.side, url, error)
            place.is_reachable, place.last_error = False, error

    def heard(self, peer: Peer) -> None:
        """A leg has given something."""
        for place in self._places.values():
            if place.facts is not None and place.facts.peer == peer:
                place.last_sign_s = self.clock()

    def sweep(self) -> list[Peer]:
        """Forget who has not joined again, and give up who has given no sign of life."""
        now_s = self.clock()
        gone = []
        for place in list(self._places.values()):
            if place.facts is not None and now_s - place.last_sign_s > LOST_S:
                gone.append(place.facts.peer)
                logger.warning("%s instance at %s is given up", place.side, place.url)
                place.facts, place.is_reachable = None, False
                place.last_error = place.last_error or f"no sign of life for {LOST_S:g} s"
            if place.joined_s is not None and now_s - place.joined_s > EXPIRY_S:
                place.joined_s = None
            # One that still answers is used until it does not.
            if not (place.is_listed or place.is_reachable or place.joined_s is not None):
                self._forget(place, "it has not joined again")
        return gone

    # -- what is known ---------------------------------------------------------------------------

    @property
    def urls(self) -> list[str]:
        return list(self._places)

    def is_usable(self, url: str) -> bool:
        return url in self._places and self._places[url].is_usable

    def knows(self, *peers: Peer) -> bool:
        """Whether all of these lives are there, reachable or not."""
        lives = {place.facts.peer for place in self._places.values() if place.facts is not None}
        return lives.issuperset(peers)

    def usable(self, side: Side) -> list[InstanceFacts]:
        """Instances that take requests, ordered by address."""
        places = sorted(self._places.values(), key=lambda place: place.url)
        return [p.facts for p in places if p.is_usable and p.facts is not None and p.side is side]

    def bootstrap_urls(self) -> list[str]:
        """Of all prefill instances that are there."""
        return sorted(
            place.facts.bootstrap_url
            for place in self._places.values()
            if place.facts is not None and place.side is Side.PREFILL
        )

    def missing(self) -> list[str]:
        """Sides without an instance that takes requests, and why."""
        return [self._missing(side) for side in Side if not self.usable(side)]

    def stats(self) -> list[dict[str, Any]]:
        """Plain JSON data of every instance."""
        now_s = self.clock()
        return [
            {
                "url": place.url,
                "role": str(place.side),
                "instance_id": place.facts.instance_id if place.facts else None,
                "epoch": str(place.facts.epoch) if place.facts else None,
                "state": place.facts.state if place.facts else "unknown",
                "is_usable": place.is_usable,
                "has_joined": place.joined_s is not None,
                "last_sign_s": round(now_s - place.last_sign_s, 3),
                "trouble": place.trouble,
            }
            for place in sorted(self._places.values(), key=lambda p: (p.side, p.url))
        ]

    def _missing(self, side: Side) -> str:
        known = [f"{p.url} ({p.trouble})" for p in self._places.values() if p.side is side]
        if known:
            return f"no {side} instance takes requests: {', '.join(sorted(known))}"
        return (
            f"no {side} instance is known; list it in router.{side}_urls, or start one with "
            f"+role={side} and disagg.router_url set to this router"
        )

    def _replace(self, place: _Place, facts: InstanceFacts) -> list[Peer]:
        before, place.facts = place.facts, facts
        if before is None or before.peer == facts.peer:
            return []
        logger.warning("%s instance at %s has been restarted", place.side, place.url)
        return [before.peer]

    def _elsewhere(self, facts: InstanceFacts) -> list[Peer]:
        """Forget where the same instance was before."""
        gone = []
        for place in list(self._places.values()):
            known = place.facts
            if known is None or place.url == facts.url or known.instance_id != facts.instance_id:
                continue
            if known.peer != facts.peer:
                gone.append(known.peer)
            self._forget(place, f"its instance is now at {facts.url}")
        return gone

    def _forget(self, place: _Place, reason: str) -> None:
        place.facts, place.is_reachable, place.joined_s = None, False, None
        place.last_error = reason
        if not place.is_listed:
            del self._places[place.url]

    def _misfit(self, facts: InstanceFacts) -> str:
        """Why this router cannot use an instance; "" = it can."""
        if facts.protocol_version != PROTOCOL_VERSION:
            return (
                f"{facts.instance_id} speaks protocol_version={facts.protocol_version}, the router "
                f"{PROTOCOL_VERSION}; run the same release of inferkit on all instances"
            )
        if facts.model and self.model and facts.model != self.model:
            return (
                f"{facts.instance_id} computes model.name={facts.model!r}, the router tokenises "
                f"for {self.model!r}; start both with the same model"
            )
        return ""
