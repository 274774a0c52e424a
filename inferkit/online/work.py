"""What a service asks of whoever computes: ranks of its own instance, or pairs of instances."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from inferkit.core.messages import Output
from inferkit.core.request import Pair
from inferkit.core.sampling_params import SamplingParams
from inferkit.online.errors import ServiceError
from inferkit.online.request_table import Key

NOT_READY = "the model is not ready yet; GET /ready tells when it is"


@dataclass(frozen=True, kw_only=True)
class Work:
    """One generation, as a worker needs it."""

    token_ids: list[int]
    sampling: SamplingParams
    """With `max_tokens`."""
    seed: int
    room: int
    is_room_given: bool = False
    """By the client; else it was drawn, and nobody else has it."""
    sample_index: int = 0
    request_id: str = ""
    remaining_s: float = 0.0
    """0 = no limit."""
    attempt: int | None = None
    """Of a request that a router has numbered; None = this instance numbers it."""
    pair: Pair | None = None

    @property
    def num_tokens(self) -> int:
        """What it may cost at most."""
        return len(self.token_ids) + (self.sampling.max_tokens or 0)


class Stream(Protocol):
    """Outputs of one generation in order; ends with the one that has a finish reason.

    Raises from the iteration:
        ServiceError: the generation cannot go on.
    """

    @property
    def key(self) -> Key: ...

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output: ...

    def abort(self, reason: str) -> None:
        """Ask for the end; it comes as an output with the finish reason `abort`."""
        ...

    def cancel(self, reason: str) -> None:
        """The same for who does not want to hear of it any more."""
        ...


class Dispatcher(Protocol):
    """Where generations are computed."""

    failure: ServiceError | None
    """Why no request can be served any more."""

    def submit(self, work: Work) -> Stream:
        """Send a generation on its way.

        Raises:
            ServiceError: nobody can take it.
        """
        ...

    def fail(self, error: ServiceError) -> None:
        """End all generations with this error, and refuse new ones."""
        ...

    def missing(self) -> list[str]:
        """Sentences that say why no request can be served now; empty = requests are taken."""
        ...

    async def until_changed(self) -> None:
        """Wait until `missing` or `failure` may have another answer."""
        ...

    @property
    def num_running(self) -> int: ...

    def stats(self) -> dict[str, Any]:
        """Plain JSON data."""
        ...
