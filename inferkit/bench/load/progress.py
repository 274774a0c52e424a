"""What is shown while a load runs: requests that are in flight and over."""

import logging
import statistics
import time

from inferkit.bench.load.client import Outcome
from inferkit.bench.load.words import OWN_NODES
from inferkit.bench.load.workload import LoadRequest
from inferkit.runtime.live_progress import LiveProgress

logger = logging.getLogger(__name__)

SERVICE_WARNING = "warning: "
NOT_OF_SERVICE = tuple(f"{node}." for node in OWN_NODES)


class LoadProgress:
    """Stages: starting the service, warming up, the load, stopping the service."""

    def __init__(self, live: LiveProgress) -> None:
        self.live = live
        self._is_started = False
        self._num_sent = 0
        self._start_s = 0.0
        self._outcomes: list[Outcome] = []
        live.begin("starting the service")

    def tell(self, text: str) -> None:
        """A line of the service."""
        is_warning = text.startswith(SERVICE_WARNING)
        text = text.removeprefix(SERVICE_WARNING)
        # A file of conf/sweep tells the service of the load as well, which is no concern of its.
        is_warning = is_warning and not text.startswith(NOT_OF_SERVICE)
        logger.log(logging.WARNING if is_warning else logging.DEBUG, "service: %s", text)
        if not self._is_started:
            self.live.update(0, status=text)

    def begin(self, stage: str, num_requests: int) -> None:
        """Requests will be sent from now on."""
        self._is_started, self._num_sent, self._start_s = True, 0, time.monotonic()
        self._outcomes = []
        self.live.begin(stage, total=num_requests)

    def on_sent(self, request: LoadRequest) -> None:
        self._num_sent += 1
        self._show()

    def on_outcome(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._show()

    def stop(self) -> None:
        self.live.begin("stopping the service")

    def _show(self) -> None:
        num_over = len(self._outcomes)
        num_failed = sum(not outcome.is_ok for outcome in self._outcomes)
        ttfts_s = [outcome.ttft_s for outcome in self._outcomes if outcome.ttft_s is not None]
        parts = [f"{self._num_sent - num_over} in flight"]
        if num_over:
            parts.append(f"{num_over / (time.monotonic() - self._start_s):.3g} requests/s")
        if ttfts_s:
            parts.append(f"first token after {statistics.median(ttfts_s) * 1e3:.0f} ms (median)")
        if num_failed:
            parts.append(f"{num_failed} failed")
        self.live.update(num_over, status=", ".join(parts))
