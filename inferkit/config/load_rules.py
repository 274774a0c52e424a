"""Rules of `runner=load`: which services it loads, and what a load may be."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from inferkit.config.faults import Findings, Fix
from inferkit.config.schema import InferenceConfig, LoadConfig

LOAD_RUNNER: Final = "inferkit.bench.load.runner.LoadRunner"
SERVICE_PORTS: Mapping[str, str] = {"serve": "disagg.http_port", "cluster": "router.port"}
"""Roles that take requests of clients by themselves -> the key of the port where they do."""


@dataclass(frozen=True, kw_only=True)
class _Range:
    text: str
    holds: Callable[[Any], bool]


_AT_LEAST_ONE = _Range(text=">= 1", holds=lambda n: n >= 1)
RANGES: Mapping[str, _Range] = {
    "num_requests": _AT_LEAST_ONE,
    "rate": _Range(
        text="> 0, or null (as fast as load.concurrency allows)",
        holds=lambda rate: rate is None or 0 < rate < math.inf,
    ),
    "concurrency": _AT_LEAST_ONE,
    "prompt_len": _AT_LEAST_ONE,
    "output_len": _AT_LEAST_ONE,
    "seed": _Range(text=">= 0", holds=lambda seed: seed >= 0),
}


def load(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    """The `load` node goes with `runner=load`, and that with a role that clients talk to."""
    default = LoadConfig()
    for name, limits in RANGES.items():
        value = getattr(cfg.load, name)
        if not limits.holds(value):
            key, problem = f"load.{name}", f"is out of range; allowed is {limits.text}"
            use = getattr(default, name)
            findings.refuse(key, value, problem, use=1.0 if use is None else use)
    if cfg.runner._target_ != LOAD_RUNNER:
        for name in (entry.name for entry in fields(LoadConfig)):
            value = getattr(cfg.load, name)
            if value != getattr(default, name):
                findings.warn(f"load.{name}", value, "has no effect without runner=load")
        return
    _role(cfg, findings)
    if cfg.load.rate is not None and cfg.load.concurrency != default.concurrency:
        problem = "limits nothing with load.rate: each request is sent when it is due"
        findings.warn("load.concurrency", cfg.load.concurrency, problem)


def _role(cfg: InferenceConfig, findings: Findings) -> None:
    """A half of a hand-off, or a router, answers nobody alone."""
    if cfg.role in SERVICE_PORTS:
        return
    known = " or ".join(f"+role={role}" for role in SERVICE_PORTS)
    if cfg.role is None:
        problem = f"puts load on a service, and this run has none; choose {known}"
        fix = Fix(add=("+role=serve",))
    else:
        problem = f"starts the service that it loads, which +role={cfg.role} alone is not; choose "
        problem += f"{known}, or load a running one with another program"
        fix = Fix(add=("+role=cluster",))
    findings.refuse("runner", "load", problem, fix=fix)


def check_load_lengths(resolved: InferenceConfig, findings: Findings) -> None:
    """Requests of the load fit the context, whose length is known by now.

    Args:
        resolved: with automatic values as numbers; an engine.max_model_len of 0 is unknown still.
    """
    if resolved.runner._target_ != LOAD_RUNNER or not resolved.engine.max_model_len:
        return
    asked, limit = resolved.load, resolved.engine.max_model_len
    if asked.prompt_len + asked.output_len > limit:
        problem = (
            f"makes {asked.prompt_len + asked.output_len} tokens with load.output_len="
            f"{asked.output_len}, but a request has at most engine.max_model_len={limit}"
        )
        use = max(1, limit - asked.output_len)
        fix = Fix(add=(f"load.prompt_len={use}",))
        if use + asked.output_len > limit:
            fix = Fix(add=(f"load.prompt_len={use}", f"load.output_len={limit - use}"))
        findings.refuse("load.prompt_len", asked.prompt_len, problem, fix=fix)
    scheduler = resolved.scheduler
    longest = scheduler.max_prefill_tokens
    if not scheduler.enable_chunked_prefill and 0 < longest < asked.prompt_len:
        problem = (
            f"is longer than scheduler.max_prefill_tokens={longest}, the longest prompt without "
            "chunked prefill"
        )
        findings.refuse("load.prompt_len", asked.prompt_len, problem, use=longest)
