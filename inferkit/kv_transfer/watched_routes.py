"""What a decode rank has found behind the bootstrap servers that it watches, and when it looks
again. It asks nobody itself: `Scout` does, and tells what it was answered.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from inferkit.core.protocols import Clock
from inferkit.kv_transfer.heartbeat import Heartbeat
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.rank_mapping import PrefillServerInfo
from inferkit.kv_transfer.route import Health

logger = logging.getLogger(__name__)

QUICK_S = 0.2
"""First pause between two looks for a route that somebody waits for; it doubles. No server is
asked more often."""
RECENT_S = 60.0
"""Somebody waits for a route that was watched so lately."""
FORGET_S = 600.0
"""A server that nobody has watched for so long is not asked any more."""
MAX_LOST = 1024
"""Lives that were told lost and are remembered, should they answer again."""


@dataclass(slots=True)
class _Entry:
    last_watched: float
    last_probe: float = float("-inf")
    info: PrefillServerInfo | None = None
    is_ready: bool = False
    delay_s: float = 0.0
    """Last pause that was shorter than the interval; 0 = none was."""
    is_probed: bool = False
    fault: str = ""
    """Kind of what is wrong with the server now."""


class WatchedRoutes:
    """Called by one thread, which is the one that the callbacks run in.

    Args:
        heartbeat: of these servers only.
        on_route: a complete route is known now, or has changed.
        on_lost: a life that was told by `on_route` does not answer, or another has its place.
        on_found: a life that was lost answers again.
    """

    def __init__(
        self,
        *,
        heartbeat: Heartbeat,
        on_route: Callable[[PrefillServerInfo], None],
        on_lost: Callable[[Peer], None],
        on_found: Callable[[Peer], None],
        clock: Clock,
    ) -> None:
        self.heartbeat = heartbeat
        self.on_route = on_route
        self.on_lost = on_lost
        self.on_found = on_found
        self.clock = clock
        self.num_faults: Counter[str] = Counter()
        """Probes that brought nothing, by cause."""
        self._entries: dict[str, _Entry] = {}
        self._lost: OrderedDict[Peer, None] = OrderedDict()

    # -- when to look --------------------------------------------------------------------------

    def watch(self, url: str, peer: Peer | None = None) -> None:
        """Somebody has a request for the prefill instance behind this server.

        Args:
            peer: the life that it is for; where another is known, the server is asked at once.
        """
        entry = self._entries.get(url)
        if entry is None:
            self._entries[url] = _Entry(self.clock())
            self.heartbeat.watch(url)
            return
        entry.last_watched = self.clock()
        is_waited_for = peer is not None and peer != self.known(url) and peer not in self._lost
        if is_waited_for or not self.is_settled(url):
            entry.delay_s = 0.0
            pause_s = entry.last_probe + QUICK_S - self.clock()
            self.heartbeat.hasten(url, max(0.0, pause_s))

    def due(self) -> list[str]:
        """Servers to ask now; `answered`, `has_route`, `lacks_ranks` or `missed` follows."""
        now = self.clock()
        for url, entry in list(self._entries.items()):
            if now - entry.last_watched > FORGET_S and not entry.is_probed:
                logger.info("bootstrap server %s is not watched any more", url)
                del self._entries[url]
                self.heartbeat.forget(url)
        urls = [url for url in self.heartbeat.due() if not self._entries[url].is_probed]
        for url in urls:
            self._entries[url].is_probed = True
            self._entries[url].last_probe = now
        return urls

    def is_settled(self, url: str) -> bool:
        """A route is known, and as far as anybody knows the instance lives."""
        entry = self._entries.get(url)
        return entry is not None and entry.info is not None and entry.info.peer not in self._lost

    def settled(self) -> dict[str, Peer]:
        """Servers whose instances are known and live, as far as anybody knows."""
        return {
            url: entry.info.peer
            for url, entry in list(self._entries.items())
            if entry.info is not None and entry.info.peer not in self._lost
        }

    def known(self, url: str) -> Peer | None:
        """The life behind a server; None = its route is not known, so it is what to ask for."""
        entry = self._entries[url]
        return None if entry.info is None else entry.info.peer

    def stats(self) -> dict[str, int]:
        """Plain numbers; may be asked for by any thread."""
        return {
            "watched": len(self._entries),
            "reachable": len(self.settled()),
            **{f"fault_{kind}": count for kind, count in sorted(dict(self.num_faults).items())},
        }

    # -- what a server said ----------------------------------------------------------------------

    def answered(self, url: str, health: Health) -> bool:
        """Whether its route is to be asked for, too."""
        entry = self._entries[url]
        if entry.info is not None and entry.info.peer != health.peer:
            self._replace(entry)
        # A route may have changed only while it was not complete.
        asks = health.ready and (entry.info is None or not entry.is_ready)
        if entry.info is None and not health.ready:
            self.lacks_ranks(url, "ranks are missing")
        elif not asks:
            entry.is_ready = health.ready
            self._is_well(url, entry)
        return asks

    def has_route(self, url: str, info: PrefillServerInfo) -> None:
        """It gave a complete one."""
        entry = self._entries[url]
        if entry.info is not None and entry.info.peer != info.peer:
            self._replace(entry)
        is_news = entry.info != info
        entry.info, entry.is_ready = info, True
        if is_news:
            logger.info(
                "prefill instance=%s at %s has %d ranks",
                info.peer.instance_id,
                url,
                info.world_size,
            )
            self.on_route(info)
        self._is_well(url, entry)

    def lacks_ranks(self, url: str, text: str) -> None:
        """It lives, and not all ranks of its instance have registered."""
        entry = self._entries[url]
        entry.is_ready = False
        self.heartbeat.on_answer(url)
        self._note_fault(url, entry, "incomplete", text)
        self._done(url, entry)

    def missed(self, url: str, kind: str, text: str) -> None:
        """It gave no answer, or one that cannot be used.

        Args:
            kind: of the fault; what is counted, and logged when it changes.
        """
        entry = self._entries[url]
        self._note_fault(url, entry, kind, text)
        if self.heartbeat.on_miss(url) and entry.info is not None:
            self._lose(entry.info.peer, f"{url}: {text}")
        self._done(url, entry)

    def _is_well(self, url: str, entry: _Entry) -> None:
        assert entry.info is not None, "a server is well when its route is known"
        self.heartbeat.on_answer(url)
        entry.fault = ""
        peer = entry.info.peer
        if peer in self._lost:
            del self._lost[peer]
            logger.info("prefill instance=%s answers again", peer.instance_id)
            self.on_found(peer)
        self._done(url, entry)

    def _done(self, url: str, entry: _Entry) -> None:
        """Say when to look again."""
        entry.is_probed = False
        waits = self.clock() - entry.last_watched <= RECENT_S
        if self.is_settled(url) or not waits:
            entry.delay_s = 0.0
            return
        entry.delay_s = max(QUICK_S, 2 * entry.delay_s)
        self.heartbeat.hasten(url, entry.delay_s)

    def _replace(self, entry: _Entry) -> None:
        """Another life has the address: no rank of the old one can be reached there."""
        assert entry.info is not None
        self._lose(entry.info.peer, "another instance, or another life of it, has its place")
        entry.info, entry.is_ready = None, False

    def _lose(self, peer: Peer, cause: str) -> None:
        if peer in self._lost:
            return
        self._lost[peer] = None
        while len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        logger.warning("prefill instance=%s is lost (%s)", peer.instance_id, cause)
        self.on_lost(peer)

    def _note_fault(self, url: str, entry: _Entry, kind: str, text: str) -> None:
        self.num_faults[kind] += 1
        if kind != entry.fault:
            entry.fault = kind
            logger.warning("bootstrap server %s (%s): %s", url, kind, text)
