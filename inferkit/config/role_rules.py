"""Rules of roles: which keys each reads, and what does not go with it."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from inferkit.config.faults import Findings, Fix
from inferkit.config.schema import (
    ClusterConfig,
    DataConfig,
    DisaggConfig,
    InferenceConfig,
    LoadConfig,
    RouterConfig,
    SweepConfig,
)

OFFLINE_RUNNER: Final = "inferkit.offline.runner.OfflineRunner"
ONLINE_RUNNER: Final = "inferkit.online.runner.OnlineRunner"
MAX_PORT = 65535
ROLE_KEYS: Mapping[str, frozenset[str]] = {
    "serve": frozenset(
        {
            "disagg.http_host",
            "disagg.http_port",
            "disagg.zmq_port",
            "router.request_timeout_s",
        }
    ),
}
"""Role -> the keys that it reads of nodes which an offline run does not read at all."""
OFFLINE_DATA = ("dataset", "dataset_path", "limit", "input_truncated_len")


def roles(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    """A role exists and goes with its runner; without one nothing of a role is set."""
    known = ", ".join(f"+role={role}" for role in ROLE_KEYS)
    if cfg.role is not None and cfg.role not in ROLE_KEYS:
        findings.refuse("role", cfg.role, f"is no role of this version; there is {known}")
        return
    _runner(cfg, findings)
    _unused(cfg, findings)
    if cfg.role is not None:
        _of_every_role(cfg, findings)


def _runner(cfg: InferenceConfig, findings: Findings) -> None:
    target = cfg.runner._target_
    key = "runner"
    if cfg.role is not None and target == OFFLINE_RUNNER:
        problem = f"does not serve, which +role={cfg.role} asks for; leave the runner to the role"
        findings.refuse(key, "offline", problem, drop=True)
    elif cfg.role is None and target == ONLINE_RUNNER:
        fix = Fix(add=("+role=serve",), drop=(key,))
        findings.refuse(key, "online", "serves a role; choose one, such as +role=serve", fix=fix)


def _unused(cfg: InferenceConfig, findings: Findings) -> None:
    """Keys that nothing reads in this mode."""
    read = ROLE_KEYS.get(cfg.role or "", frozenset())
    where = f"in +role={cfg.role}" if cfg.role else "without a role"
    nodes: tuple[tuple[str, Any, Any], ...] = (
        ("disagg", cfg.disagg, DisaggConfig()),
        ("router", cfg.router, RouterConfig()),
        ("cluster", cfg.cluster, ClusterConfig()),
        ("load", cfg.load, LoadConfig()),
        ("sweep", cfg.sweep, SweepConfig()),
    )
    for name, node, default in nodes:
        problem = f"has no effect {where}"
        if name == "load":
            problem = "has no effect: this version has no load benchmark"
        elif name == "sweep":
            problem = "has no effect: every cell runs and is listed"
        for key, value, _ in differences(name, node, default):
            if key not in read:
                findings.refuse(key, value, problem, drop=True)


def _of_every_role(cfg: InferenceConfig, findings: Findings) -> None:
    if cfg.scheduler.fixed_steps:
        problem = "is for the step timing of an offline run; requests of a role end by themselves"
        findings.refuse("scheduler.fixed_steps", True, problem, use=False)
    if len(cfg.parallel.node_ips) > 1:
        problem = f"+role={cfg.role} runs on one node in this version"
        findings.refuse("parallel.node_ips", cfg.parallel.node_ips, problem, use=[])
    default = DataConfig()
    for name in OFFLINE_DATA:
        value = getattr(cfg.data, name)
        if value != getattr(default, name):
            findings.warn(
                f"data.{name}", value, f"has no effect in +role={cfg.role}: prompts come by HTTP"
            )
    for name, highest in (("http_port", MAX_PORT), ("zmq_port", MAX_PORT - 1)):
        port = getattr(cfg.disagg, name)
        if not 0 <= port <= highest:
            problem = f"is out of range; allowed is 0 (a free one is chosen) to {highest}"
            findings.refuse(f"disagg.{name}", port, problem, use=0)
    if cfg.router.request_timeout_s <= 0:
        findings.refuse(
            "router.request_timeout_s",
            cfg.router.request_timeout_s,
            "is out of range; allowed is > 0",
            use=RouterConfig().request_timeout_s,
        )


def differences(prefix: str, node: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, default) of every key that differs, in nested nodes too."""
    for (key, value), (_, expected) in zip(
        leaves(prefix, node), leaves(prefix, default), strict=True
    ):
        if value != expected:
            yield key, value, expected


def leaves(prefix: str, node: Any) -> Iterator[tuple[str, Any]]:
    """(key, value) of every key, in nested nodes too."""
    for entry in fields(node):
        key = f"{prefix}.{entry.name}" if prefix else entry.name
        value = getattr(node, entry.name)
        if is_dataclass(value):
            yield from leaves(key, value)
        else:
            yield key, value
