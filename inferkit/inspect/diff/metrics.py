"""The metrics of two runs side by side: ratios, and which way is better.

Figures of one run each say nothing of their spread: a difference below NOISE is called equal, and
so is one of a request's times below JITTER_S.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NOISE = 0.02
"""Share by which two runs of the same configuration differ on a quiet machine."""
JITTER_S = 1e-3
"""What the system's own scheduling adds to a time that is taken once for each request."""
ONCE_PER_REQUEST = ("queue_s", "ttft_s", "e2e_s")
BETTER, WORSE, EQUAL = "better", "worse", "equal"
LOWER_IS_BETTER = (
    "peak_memory_bytes",
    "num_preemptions",
    "num_failed",
    "collective_share",
    "expert_load.imbalance",
)
HIGHER_IS_BETTER = ("prefix_cache_hit_rate",)
WITHIN_STEPS = ".inference_time_s."
"""The forward's part of a step, which only JSON shows."""
LEFT_OUT = ("expert_load.layers",)
"""A figure of every expert of every layer."""
DETAILS = ("num", "mean", "p90")
"""Parts of a distribution that only JSON shows: beside p50 and p99 they say little."""


@dataclass(frozen=True, kw_only=True)
class MetricPair:
    """A figure of both runs."""

    name: str
    """As in metrics.json, with dots: `ttft_s.p50`."""
    left: float
    right: float
    verdict: str
    """BETTER, WORSE or EQUAL: the right one against the left one. Empty = neither is better."""

    @property
    def ratio(self) -> float | None:
        """right / left; None where left is 0."""
        return self.right / self.left if self.left else None

    @property
    def is_detail(self) -> bool:
        """Whether people can do without it: it is the same, or a part of a distribution."""
        if self.left == self.right or WITHIN_STEPS in self.name:
            return True
        return "." in self.name and self.name.rpartition(".")[2] in DETAILS


def compare_metrics(
    left: Mapping[str, Any] | None, right: Mapping[str, Any] | None
) -> tuple[MetricPair, ...]:
    """All figures that both runs have, in the order of metrics.json."""
    if left is None or right is None:
        return ()
    others = dict(_figures(right))
    return tuple(
        MetricPair(name=name, left=value, right=others[name], verdict=_verdict(name, value, others))
        for name, value in _figures(left)
        if name in others
    )


def _figures(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if name not in LEFT_OUT:
                yield from _figures(value, f"{name}.")
        elif _is_number(value):
            yield name, value


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _verdict(name: str, left: float, others: Mapping[str, float]) -> str:
    right, sign = others[name], _direction(name)
    if not sign:
        return ""
    jitter = JITTER_S if name.partition(".")[0] in ONCE_PER_REQUEST else 0.0
    if abs(right - left) <= max(NOISE * max(abs(left), abs(right)), jitter):
        return EQUAL
    return BETTER if (right > left) == (sign > 0) else WORSE


def _direction(name: str) -> int:
    """1 where more is better, -1 where less is, 0 where it is neither: `num_requests`."""
    if name in HIGHER_IS_BETTER:
        return 1
    if name in LOWER_IS_BETTER:
        return -1
    parts = name.split(".")
    if parts[-1] == "num":
        return 0
    if any(part.endswith("_per_s") or part.startswith("goodput") for part in parts):
        return 1
    return -1 if any(part.endswith("_s") for part in parts) else 0
