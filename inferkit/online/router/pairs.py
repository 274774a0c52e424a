"""Which pair serves an attempt. Pure; time comes from outside."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from inferkit.core.protocols import Clock
from inferkit.kv_transfer.identity import Peer
from inferkit.online.facts import Side
from inferkit.online.router.breaker import Breaker, BreakerState
from inferkit.online.router.registry import Registry
from inferkit.online.router.route import Route, RouteKey
from inferkit.online.router.routed_request import Failed


class Policy(StrEnum):
    HASH = "hash"
    """By (room, attempt): even on average, and equal in every router that knows the same pairs."""
    LEAST_LOADED = "least_loaded"
    """The instances with the fewest tokens that this router waits for."""


class PairTable:
    """All pairs of instances that take requests, each with a breaker.

    `refresh` follows whatever has changed at the registry.
    """

    def __init__(self, *, registry: Registry, policy: Policy, clock: Clock) -> None:
        self.registry = registry
        self.policy = policy
        self.clock = clock
        self.outstanding: Counter[Peer] = Counter()
        """Tokens that each instance has to compute for this router, at most."""
        self._breakers: dict[RouteKey, Breaker] = {}
        self._routes: dict[RouteKey, Route] = {}

    def refresh(self) -> None:
        """Pairs of new instances are unproven; those of former lives are forgotten."""
        decodes = self.registry.usable(Side.DECODE)
        routes = [Route(p, d) for p in self.registry.usable(Side.PREFILL) for d in decodes]
        self._routes = {route.key: route for route in routes}
        lives = {peer for key in self._routes for peer in key}
        for key in list(self._breakers):
            # An instance that cannot be reached for a moment has not become another one.
            if key not in self._routes and not self.registry.knows(key[0], key[1]):
                del self._breakers[key]
        for key in self._routes:
            self._breakers.setdefault(key, Breaker())
        for peer in [peer for peer, count in self.outstanding.items() if not count]:
            if peer not in lives:
                del self.outstanding[peer]

    def has(self, route: Route) -> bool:
        """Whether both instances still take requests."""
        return route.key in self._routes

    # -- choice ----------------------------------------------------------------------------------

    def choose(self, room: int, attempt: int, failed: Sequence[Failed] = ()) -> Route | None:
        """A pair for an attempt; None = there is none that takes requests.

        A retry goes past the instance that failed where that is possible, else to another pair,
        else to the same one.
        """
        routes = [route for key, route in self._routes.items() if self._breakers[key].is_closed]
        if not routes:
            return None
        at_fault = {f.route.side(f.side).peer for f in failed}
        used = {f.route.key for f in failed}
        tiers: tuple[list[Route], ...] = (
            [route for route in routes if at_fault.isdisjoint(route.key)],
            [route for route in routes if route.key not in used],
            routes,
        )
        candidates = next(tier for tier in tiers if tier)
        if self.policy is Policy.LEAST_LOADED:
            candidates = self._least_loaded(candidates)
        return candidates[hash_of(room, attempt) % len(candidates)]

    def _least_loaded(self, routes: list[Route]) -> list[Route]:
        """All that are equally good; first by prefill, whose work comes first."""
        for side in Side:
            least = min(self.outstanding[route.side(side).peer] for route in routes)
            routes = [r for r in routes if self.outstanding[r.side(side).peer] == least]
        return routes

    # -- breakers --------------------------------------------------------------------------------

    def report(self, route: Route, failed: Failed | None) -> None:
        """What a client's request says of its pair."""
        breaker = self._breakers.get(route.key)
        if breaker is None:
            return
        if failed is None:
            breaker.succeed()
        else:
            breaker.fail(str(failed), self.clock())

    def probes_due(self) -> list[Route]:
        """Pairs to be probed now; each must be answered by `end_probe`."""
        now_s = self.clock()
        due = []
        for key, route in self._routes.items():
            due_s = self._breakers[key].probe_due_s()
            if due_s is not None and due_s <= now_s:
                self._breakers[key].begin_probe()
                due.append(route)
        return due

    def next_probe_s(self) -> float | None:
        """When the next one is due."""
        times = [self._breakers[key].probe_due_s() for key in self._routes]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def end_probe(self, route: Route, error: str) -> None:
        """Args:
        error: why no tokens came; "" = they did.
        """
        breaker = self._breakers.get(route.key)
        if breaker is not None:
            breaker.end_probe(error, self.clock())

    # -- what is known ---------------------------------------------------------------------------

    @property
    def routes(self) -> Iterable[Route]:
        return self._routes.values()

    def missing(self) -> list[str]:
        """Why no request can be served; empty = some pair takes them."""
        missing = self.registry.missing()
        if missing:
            return missing
        if any(self._breakers[key].is_closed for key in self._routes):
            return []
        return [f"no pair has generated: {', '.join(map(self._trouble, self._routes.values()))}"]

    def stats(self) -> list[dict[str, Any]]:
        """Plain JSON data of every pair."""
        return [
            {
                "prefill": route.prefill.instance_id,
                "decode": route.decode.instance_id,
                "breaker": str(self._breakers[key].state),
                "num_failures": self._breakers[key].num_failures,
                "last_error": self._breakers[key].last_error,
            }
            for key, route in self._routes.items()
        ]

    def _trouble(self, route: Route) -> str:
        breaker = self._breakers[route.key]
        error = breaker.last_error or "the first generation is under way"
        if breaker.state is BreakerState.UNPROVEN:
            error = "not asked yet"
        return f"{route.prefill.url} with {route.decode.url} ({error})"


def hash_of(room: int, attempt: int) -> int:
    """Spreads evenly, and is the same in every process."""
    data = room.to_bytes(8, "big") + attempt.to_bytes(8, "big")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
