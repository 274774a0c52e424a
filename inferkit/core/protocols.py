"""What components are given from outside: time, messages, the engine."""

from typing import Any, Protocol

from inferkit.core.batch import Batch
from inferkit.core.step_output import StepOutput


class Clock(Protocol):
    """Monotonic time in seconds; `time.monotonic` is one."""

    def __call__(self) -> float: ...


class Engine(Protocol):
    """What a scheduler may ask of an engine."""

    def forward_batch(self, batch: Batch) -> StepOutput:
        """Run one step; every rank enters with equal arguments, also with a dummy batch."""
        ...


class Channel(Protocol):
    """One-way messages from a worker to whoever shows progress."""

    def send(self, event: dict[str, Any]) -> None: ...
