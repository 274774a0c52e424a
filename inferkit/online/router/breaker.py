"""When a pair of instances takes requests. Pure; time comes from outside.

```
unproven --probe--> probing --ok--> closed --failures in a row--> open --time--> probing ...
                            --no--> open
```

A pair is proven by a generation of the router's own before any client depends on it, and again
after it was open: no client pays for the question.
"""

from enum import StrEnum

THRESHOLD = 3
"""Failures in a row; a single one may be the request's."""
FIRST_OPEN_S = 1.0
MAX_OPEN_S = 15.0
"""Less than the time for which clients repeat their requests."""


class BreakerState(StrEnum):
    UNPROVEN = "unproven"
    PROBING = "probing"
    CLOSED = "closed"
    OPEN = "open"


class Breaker:
    """Of one pair, for the lives that its two instances have now."""

    def __init__(self, *, threshold: int = THRESHOLD) -> None:
        self.threshold = threshold
        self.state = BreakerState.UNPROVEN
        self.num_failures = 0
        """In a row."""
        self.last_error = ""
        self._open_s = FIRST_OPEN_S
        self._open_until_s = float("-inf")

    @property
    def is_closed(self) -> bool:
        """Requests may go this way."""
        return self.state is BreakerState.CLOSED

    def probe_due_s(self) -> float | None:
        """When it should be probed; None = not at all."""
        if self.state in (BreakerState.CLOSED, BreakerState.PROBING):
            return None
        return self._open_until_s

    def begin_probe(self) -> None:
        self.state = BreakerState.PROBING

    def end_probe(self, error: str, now_s: float) -> None:
        """`error` is empty when tokens have come back."""
        if error:
            self.last_error = error
            self._open(now_s)
            return
        self.state = BreakerState.CLOSED
        self.num_failures, self.last_error = 0, ""
        self._open_s = FIRST_OPEN_S

    def succeed(self) -> None:
        """A client's request has got tokens. One that began before it opened changes nothing."""
        if self.is_closed:
            self.num_failures = 0

    def fail(self, error: str, now_s: float) -> None:
        """A client's request has failed on this pair, by no fault of the client."""
        if not self.is_closed:
            return
        self.last_error = error
        self.num_failures += 1
        if self.num_failures >= self.threshold:
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        self.state = BreakerState.OPEN
        self._open_until_s = now_s + self._open_s
        self._open_s = min(2 * self._open_s, MAX_OPEN_S)
