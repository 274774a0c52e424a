"""Rules of roles: what each runs, which keys each reads, and what does not go with it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from inferkit.config.faults import Fault, Findings, Fix
from inferkit.config.network_rules import hand_off, network
from inferkit.config.schema import (
    ClusterConfig,
    DataConfig,
    DisaggConfig,
    DisaggMode,
    InferenceConfig,
    RouterConfig,
)

OFFLINE_RUNNER: Final = "inferkit.offline.runner.OfflineRunner"
ONLINE_RUNNER: Final = "inferkit.online.runner.OnlineRunner"
ROUTER_RUNNER: Final = "inferkit.online.router.runner.RouterRunner"
CLUSTER_RUNNER: Final = "inferkit.online.cluster.runner.ClusterRunner"
SCHEDULER: Final = "inferkit.scheduler.scheduler.Scheduler"
PREFILL_SCHEDULER: Final = "inferkit.scheduler.prefill_disagg.PrefillDisaggScheduler"
DECODE_SCHEDULER: Final = "inferkit.scheduler.decode_disagg.DecodeDisaggScheduler"

TIMERS = frozenset(
    f"disagg.{entry.name}" for entry in fields(DisaggConfig) if entry.name.endswith("_s")
)
ENGINE_KEYS = frozenset(
    {"disagg.transfer._target_", "disagg.transfer.params", "disagg.transfer.num_threads"}
)
HAND_OFF_KEYS = (
    TIMERS | ENGINE_KEYS | {"disagg.verify_digest", "disagg.heartbeat_misses", "disagg.secret_env"}
)
"""What both sides of a hand-off read."""
INSTANCE_KEYS = frozenset(
    {
        "disagg.mode",
        "disagg.prefill_ips",
        "disagg.decode_ips",
        "disagg.bootstrap_port",
        "disagg.http_host",
        "disagg.http_port",
        "disagg.zmq_port",
        "disagg.router_url",
        "router.request_timeout_s",
    }
)
ROUTER_KEYS = frozenset(f"router.{entry.name}" for entry in fields(RouterConfig))
CLUSTER_KEYS = frozenset(f"cluster.{entry.name}" for entry in fields(ClusterConfig))


@dataclass(frozen=True, kw_only=True)
class Role:
    """What belongs to a role."""

    runner: str
    scheduler: str = SCHEDULER
    mode: DisaggMode = DisaggMode.none
    keys: frozenset[str]
    """Keys that it reads of nodes which an offline run does not read at all."""


ROLES: Mapping[str, Role] = {
    "serve": Role(
        runner=ONLINE_RUNNER,
        keys=frozenset(
            {"disagg.http_host", "disagg.http_port", "disagg.zmq_port", "router.request_timeout_s"}
        ),
    ),
    "prefill": Role(
        runner=ONLINE_RUNNER,
        scheduler=PREFILL_SCHEDULER,
        mode=DisaggMode.prefill,
        keys=HAND_OFF_KEYS | INSTANCE_KEYS,
    ),
    "decode": Role(
        runner=ONLINE_RUNNER,
        scheduler=DECODE_SCHEDULER,
        mode=DisaggMode.decode,
        keys=HAND_OFF_KEYS | INSTANCE_KEYS,
    ),
    "router": Role(
        runner=ROUTER_RUNNER,
        keys=ROUTER_KEYS | {"disagg.secret_env"},
    ),
    "cluster": Role(
        runner=CLUSTER_RUNNER,
        keys=HAND_OFF_KEYS
        | CLUSTER_KEYS
        | (ROUTER_KEYS - {"router.prefill_urls", "router.decode_urls"}),
    ),
}
OFFLINE_DATA = ("dataset", "dataset_path", "limit", "input_truncated_len")
INSTANCE_NODES = ("parallel", "kv_cache", "scheduler")
"""Nodes of which a router, which runs no model, reads next to nothing."""


def roles(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    """A role exists and goes with its parts; without one nothing of a role is set."""
    if cfg.role is not None and cfg.role not in ROLES:
        known = ", ".join(f"+role={role}" for role in ROLES)
        findings.refuse("role", cfg.role, f"is no role of this version; there is {known}")
        return
    _parts(cfg, findings)
    _unused(cfg, findings)
    if cfg.role is None:
        return
    _of_every_role(cfg, findings)
    network(cfg, findings)
    if cfg.role == "decode" and cfg.parallel.cp_size > 1:
        problem = "is for prefill alone: ranks of a decode role share no prompt's tokens"
        findings.refuse("parallel.cp_size", cfg.parallel.cp_size, problem, use=1)
    if cfg.role in ("prefill", "decode", "cluster"):
        hand_off(cfg, findings)
    if cfg.role == "router":
        _unread_by_router(cfg, findings)


def _parts(cfg: InferenceConfig, findings: Findings) -> None:
    """Runner, scheduler and mode of hand-off go with the role; a user's own go with any."""
    runner, scheduler, mode = cfg.runner._target_, cfg.scheduler._target_, cfg.disagg.mode
    role = ROLES.get(cfg.role or "")
    serving = {entry.runner: name for name, entry in reversed(list(ROLES.items()))}
    if role is None:
        if runner in serving:
            name = serving[runner]
            problem = f"serves a role; choose one, such as +role={name}"
            fix = Fix(add=(f"+role={name}",), drop=("runner",))
            findings.refuse("runner", _option(runner), problem, fix=fix)
    elif runner == OFFLINE_RUNNER:
        problem = f"does not serve, which +role={cfg.role} asks for; leave the runner to the role"
        findings.refuse("runner", "offline", problem, drop=True)
    elif runner in serving and runner != role.runner:
        problem = f"is not what +role={cfg.role} runs; leave the runner to the role"
        findings.refuse("runner", _option(runner), problem, drop=True)

    expected_mode = DisaggMode.none if role is None else role.mode
    if mode is not expected_mode:
        fix = Fix(drop=("disagg.mode",))
        if role is None:
            problem = f"is a part of a role; choose +role={mode.name}"
            fix = Fix(add=(f"+role={mode.name}",), drop=("disagg.mode",))
        else:
            problem = f"contradicts +role={cfg.role}, which has disagg.mode={expected_mode.name}; "
            problem += "leave it to the role"
        findings.refuse("disagg.mode", mode, problem, fix=fix)

    owners = {PREFILL_SCHEDULER: "prefill", DECODE_SCHEDULER: "decode"}
    expected = SCHEDULER if role is None else role.scheduler
    if scheduler in (SCHEDULER, *owners) and scheduler != expected:
        here = f"+role={cfg.role}" if cfg.role else "a run without a role"
        owner = owners.get(scheduler)
        if owner is None:
            problem = f"hands no KV over, as {here} must; leave the scheduler to the role"
        else:
            problem = f"is for +role={owner}, and this is {here}; leave the scheduler to the role"
        name = owner or "default"
        findings.refuse("scheduler", name, problem, drop=True, related=("disagg.mode",))


def _option(runner: str) -> str:
    """`inferkit.online.router.runner.RouterRunner` -> `router`."""
    return runner.rpartition(".")[2].removesuffix("Runner").lower()


def _unused(cfg: InferenceConfig, findings: Findings) -> None:
    """Keys that nothing reads in this mode."""
    role = ROLES.get(cfg.role or "")
    read = (role.keys if role else frozenset()) | {"disagg.mode"}
    where = f"in +role={cfg.role}" if cfg.role else "without a role"
    nodes: tuple[tuple[str, Any, Any], ...] = (
        ("disagg", cfg.disagg, DisaggConfig()),
        ("router", cfg.router, RouterConfig()),
        ("cluster", cfg.cluster, ClusterConfig()),
    )
    for name, node, default in nodes:
        problem = f"has no effect {where}"
        for key, value, _ in differences(name, node, default):
            if key not in read:
                findings.refuse(key, value, problem, drop=True)


def _of_every_role(cfg: InferenceConfig, findings: Findings) -> None:
    if cfg.scheduler.fixed_steps:
        problem = "is for the step timing of an offline run; requests of a role end by themselves"
        findings.refuse("scheduler.fixed_steps", True, problem, use=False)
    if len(cfg.parallel.node_ips) > 1:
        problem = f"+role={cfg.role} runs on one node in this version"
        if cfg.role in ("prefill", "decode"):
            key = f"disagg.{cfg.role}_ips"
            problem = f"+role={cfg.role} names the nodes of all its instances in {key}"
        findings.refuse("parallel.node_ips", cfg.parallel.node_ips, problem, use=[])
    default = DataConfig()
    for name in OFFLINE_DATA:
        value = getattr(cfg.data, name)
        if value != getattr(default, name):
            findings.warn(
                f"data.{name}", value, f"has no effect in +role={cfg.role}: prompts come by HTTP"
            )


def _unread_by_router(cfg: InferenceConfig, findings: Findings) -> None:
    """One warning for all: an experiment that names the model sets them too."""
    changed = [
        key
        for name in INSTANCE_NODES
        for key, _, _ in differences(name, getattr(cfg, name), type(getattr(cfg, name))())
        if not key.endswith("._target_") and key != "scheduler.max_new_tokens"
    ]
    if changed:
        problem = "has no effect in +role=router: its instances have their own"
        findings.warnings.append(Fault(key=", ".join(changed), problem=problem))


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
