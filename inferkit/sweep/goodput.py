"""How many requests keep the limits of sweep.slo. Pure functions of the times of requests.

good          the request came to its own end and keeps every limit that is set
attainment    good requests / all requests
goodput       good requests / seconds that the load took
per device    goodput / number of ranks of all instances
offered       requests / seconds from the first to the last that was sent; goodput never beats it,
              while of a few requests the gaps may be shorter on the whole than load.rate asks for
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNFINISHED = ("", "abort", "error", "failed", "prompt_too_long", "refused", "unfinished")
"""Reasons for which a request ended that never gave what was asked of it."""

NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}
"""Of limits, in the order of a request."""


@dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """Seconds; None where a request did not come that far."""

    is_finished: bool
    """It ended as it should have, by its length or a stop."""
    ttft_s: float | None = None
    """To the first token, from arrival."""
    tpot_s: float | None = None
    """Mean per token after the first; None also of an output of one token."""
    e2e_s: float | None = None
    """To the end, from arrival."""
    sent_s: float | None = None
    """When it was sent, from the beginning of a load."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "RequestTimes":
        """From a line of generations.jsonl or requests.jsonl."""
        reason = str(record.get("finish_reason") or "")
        return cls(
            is_finished=reason not in UNFINISHED and not record.get("error"),
            ttft_s=record.get("ttft_s"),
            tpot_s=record.get("tpot_s"),
            e2e_s=record.get("e2e_s"),
            sent_s=record.get("sent_s"),
        )


def is_good(times: RequestTimes, limits: Mapping[str, float], *, scale: float = 1.0) -> bool:
    """Whether a request keeps all `limits` (`{"ttft_s": 0.5}`), each times `scale`.

    An output of one token has no time per further token, so it keeps any limit of that.
    """
    if not times.is_finished:
        return False
    for name, limit in limits.items():
        value = getattr(times, name)
        if value is None:
            if name != "tpot_s":
                return False
        elif value > limit * scale:
            return False
    return True


def attainment(
    requests: Sequence[RequestTimes], limits: Mapping[str, float], *, scale: float = 1.0
) -> float | None:
    """Share of requests that are good; None without requests."""
    if not requests:
        return None
    return sum(is_good(times, limits, scale=scale) for times in requests) / len(requests)


def offered(requests: Sequence[RequestTimes]) -> float | None:
    """Requests per second that were sent; None where that is not known."""
    sent_s = [times.sent_s for times in requests if times.sent_s is not None]
    duration_s = max(sent_s, default=0.0) - min(sent_s, default=0.0)
    return len(sent_s) / duration_s if duration_s > 0 else None


def goodput(
    requests: Sequence[RequestTimes],
    limits: Mapping[str, float],
    *,
    wall_time_s: float | None,
    num_devices: int = 1,
    scale: float = 1.0,
) -> float | None:
    """Good requests per second and device; None where there is no time or no request."""
    if not requests or not wall_time_s or wall_time_s <= 0:
        return None
    num_good = sum(is_good(times, limits, scale=scale) for times in requests)
    return num_good / wall_time_s / num_devices


def limits_text(limits: Mapping[str, float], at_most: str = "<=") -> str:
    """`TTFT <= 500 ms, TPOT <= 50 ms`."""
    texts = []
    for name in (name for name in NAMES if name in limits):
        limit = limits[name]
        text = f"{limit * 1e3:g} ms" if limit < 1 else f"{limit:g} s"
        texts.append(f"{NAMES[name]} {at_most} {text}")
    return ", ".join(texts)
