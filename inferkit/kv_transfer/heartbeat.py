"""Which peers are due for a probe, and which have missed too many."""

from dataclasses import dataclass

from inferkit.core.protocols import Clock


@dataclass(slots=True)
class _Watch:
    next_probe: float
    num_missed: int = 0


class Heartbeat:
    """Counts missed probes; sends none itself.

    Args:
        interval_s: between two probes of a peer.
        num_misses: missed probes in a row after which a peer is lost.
    """

    def __init__(self, *, interval_s: float, num_misses: int, clock: Clock) -> None:
        self.interval_s = interval_s
        self.num_misses = num_misses
        self.clock = clock
        self._watched: dict[str, _Watch] = {}

    def watch(self, name: str) -> None:
        """Probe a peer from now on; one that is watched already stays as it is."""
        self._watched.setdefault(name, _Watch(self.clock()))

    def forget(self, name: str) -> None:
        self._watched.pop(name, None)

    def hasten(self, name: str, delay_s: float) -> None:
        """Probe a peer within `delay_s`, where that is sooner than its interval says."""
        watch = self._watched.get(name)
        if watch is not None:
            watch.next_probe = min(watch.next_probe, self.clock() + delay_s)

    def due(self) -> list[str]:
        """Peers to probe now; each answer or failure is told."""
        now = self.clock()
        names = [name for name, watch in self._watched.items() if now >= watch.next_probe]
        for name in names:
            self._watched[name].next_probe = now + self.interval_s
        return names

    def seconds_to_next(self) -> float | None:
        """Until a peer is due; None = nobody is watched."""
        times = [watch.next_probe for watch in self._watched.values()]
        return max(0.0, min(times) - self.clock()) if times else None

    def on_answer(self, name: str) -> bool:
        """Whether a lost peer is back."""
        watch = self._watched.get(name)
        if watch is None:
            return False
        was_lost = watch.num_missed >= self.num_misses
        watch.num_missed = 0
        return was_lost

    def on_miss(self, name: str) -> bool:
        """Whether the peer is lost with this miss; it is probed on."""
        watch = self._watched.get(name)
        if watch is None:
            return False
        watch.num_missed += 1
        return watch.num_missed == self.num_misses
