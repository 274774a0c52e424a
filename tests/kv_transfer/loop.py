"""Virtual time: events happen in the order of their times, nothing waits."""

import heapq
from collections.abc import Callable

Event = Callable[[], None]


class Loop:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._queue: list[tuple[float, int, Event]] = []
        self._order = 0

    def clock(self) -> float:
        return self.now_s

    def after(self, delay_s: float, event: Event) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._order, event))

    def run(self, until_s: float, after_each: Event) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._queue)
            event()
            self.num_events += 1
            after_each()
        self.now_s = until_s
