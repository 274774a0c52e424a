"""Rules of roles: what each runs, and what does not go with it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from inferkit.config.faults import Findings, Fix
from inferkit.config.network_rules import hand_off, network
from inferkit.config.schema import (
    DisaggMode,
    InferenceConfig,
)

OFFLINE_RUNNER: Final = "inferkit.offline.runner.OfflineRunner"
ONLINE_RUNNER: Final = "inferkit.online.runner.OnlineRunner"
ROUTER_RUNNER: Final = "inferkit.online.router.runner.RouterRunner"
CLUSTER_RUNNER: Final = "inferkit.online.cluster.runner.ClusterRunner"
SCHEDULER: Final = "inferkit.scheduler.scheduler.Scheduler"
PREFILL_SCHEDULER: Final = "inferkit.scheduler.prefill_disagg.PrefillDisaggScheduler"
DECODE_SCHEDULER: Final = "inferkit.scheduler.decode_disagg.DecodeDisaggScheduler"


@dataclass(frozen=True, kw_only=True)
class Role:
    """What belongs to a role."""

    runner: str
    scheduler: str = SCHEDULER
    mode: DisaggMode = DisaggMode.none


ROLES: Mapping[str, Role] = {
    "serve": Role(runner=ONLINE_RUNNER),
    "prefill": Role(runner=ONLINE_RUNNER, scheduler=PREFILL_SCHEDULER, mode=DisaggMode.prefill),
    "decode": Role(runner=ONLINE_RUNNER, scheduler=DECODE_SCHEDULER, mode=DisaggMode.decode),
    "router": Role(runner=ROUTER_RUNNER),
    "cluster": Role(runner=CLUSTER_RUNNER),
}


def roles(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    """A role exists and goes with its parts; without one nothing of a role is set."""
    if cfg.role is not None and cfg.role not in ROLES:
        known = ", ".join(f"+role={role}" for role in ROLES)
        findings.refuse("role", cfg.role, f"is no role of this version; there is {known}")
        return
    _parts(cfg, findings)
    if cfg.role is None:
        return
    _of_every_role(cfg, findings)
    network(cfg, findings)
    if cfg.role == "decode" and cfg.parallel.cp_size > 1:
        problem = "is for prefill alone: ranks of a decode role share no prompt's tokens"
        fix = Fix(drop=("parallel", "parallel.cp_size", "parallel.world_size"))
        findings.refuse("parallel.cp_size", cfg.parallel.cp_size, problem, fix=fix)
    if cfg.role in ("prefill", "decode", "cluster"):
        hand_off(cfg, findings)


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
        fix = Fix(drop=("scheduler",))
        if role is None and owner is not None:
            problem = f"is for +role={owner}, which chooses it by itself; choose the role"
            fix = Fix(add=(f"+role={owner}",), drop=("scheduler",))
        findings.refuse("scheduler", name, problem, fix=fix, related=("disagg.mode",))


def _option(runner: str) -> str:
    """`inferkit.online.router.runner.RouterRunner` -> `router`."""
    return runner.rpartition(".")[2].removesuffix("Runner").lower()


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


def leaves(prefix: str, node: Any) -> Iterator[tuple[str, Any]]:
    """(key, value) of every key, in nested nodes too."""
    for entry in fields(node):
        key = f"{prefix}.{entry.name}" if prefix else entry.name
        value = getattr(node, entry.name)
        if is_dataclass(value):
            yield from leaves(key, value)
        else:
            yield key, value
