"""torch.profiler traces of chosen steps. Which device is traced is the platform's business."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

NUM_PREFILL_STEPS = 1
NUM_SKIPPED_DECODE_STEPS = 3
"""The first decode steps pay for memory and code that later ones find ready."""
NUM_DECODE_STEPS = 3


class NullProfiler:
    """Traces nothing."""

    def step(self, is_prefill: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class Profiler:
    """Traces the first prefill step, and decode steps 4 to 6.

    The traces are `<output_dir>/prefill/rank<rank>.json` and `<output_dir>/decode/rank<rank>.json`,
    in Chrome's format (chrome://tracing, ui.perfetto.dev). Traced steps are slower. A prefill step
    between two traced decode steps is in their trace, under its own name.

    Args:
        activities: what torch.profiler records, from `platform.profiler_activities()`.
    """

    def __init__(self, *, output_dir: Path, activities: Sequence[Any], rank: int = 0) -> None:
        self._prefill = _PhaseTrace(
            path=output_dir / "prefill" / f"rank{rank}.json",
            activities=activities,
            num_skipped=0,
            num_active=NUM_PREFILL_STEPS,
        )
        self._decode = _PhaseTrace(
            path=output_dir / "decode" / f"rank{rank}.json",
            activities=activities,
            num_skipped=NUM_SKIPPED_DECODE_STEPS,
            num_active=NUM_DECODE_STEPS,
        )

    @contextmanager
    def step(self, is_prefill: bool) -> Iterator[None]:
        """Surround the forward of one step."""
        phase = self._prefill if is_prefill else self._decode
        phase.before_step()
        with torch.profiler.record_function("prefill step" if is_prefill else "decode step"):
            yield
        phase.after_step()

    def close(self) -> None:
        """Write what a run that ended early has traced so far."""
        self._prefill.close()
        self._decode.close()


class _PhaseTrace:
    """Counts the steps of one phase and holds the profiler while some of them are traced."""

    def __init__(
        self, *, path: Path, activities: Sequence[Any], num_skipped: int, num_active: int
    ) -> None:
        self.path = path
        self.activities = activities
        self.first = num_skipped
        self.end = num_skipped + num_active
        self.num_steps = 0
        self._profile: torch.profiler.profile | None = None

    def before_step(self) -> None:
        if self.num_steps == self.first:
            self._profile = torch.profiler.profile(
                activities=self.activities, record_shapes=True, acc_events=True
            )
            self._profile.start()

    def after_step(self) -> None:
        self.num_steps += 1
        if self.num_steps == self.end:
            self.close()

    def close(self) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self.path))
        logger.info("profile steps=%d path=%s", self.num_steps - self.first, self.path)
        self._profile = None
