"""Checks a cluster as a whole: its own node, every role by itself, prefill against decode."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from inferkit.config.cluster_roles import (
    DECODE,
    INSTANCES,
    PREFILL,
    ROUTER,
    RoleCheck,
    Shares,
    merged_faults,
    own_words,
    pair_faults,
    port_faults,
    role_words,
    shares_of_host,
    unusable_words,
)
from inferkit.config.faults import Fault, key_of
from inferkit.config.no_effect import NO_EFFECT
from inferkit.config.schema import InferenceConfig
from inferkit.core.host import available_memory

ROLES = (ROUTER, PREFILL, DECODE)

RoleOutcome = tuple[Sequence[Fault], Sequence[Fault], InferenceConfig]
"""Faults, warnings, and the configuration as composed; only its platform is resolved."""
CheckRole = Callable[[Sequence[str]], RoleOutcome]
"""Checks the overrides of one role."""


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """What a cluster starts."""

    words: dict[str, list[str]]
    """Role -> the overrides of each of its processes."""
    configs: dict[str, InferenceConfig]
    """Role -> its configuration as composed; only its platform is resolved."""
    faults: list[Fault]
    warnings: list[Fault]


def plan_cluster(
    overrides: Sequence[str],
    cfg: InferenceConfig,
    check: CheckRole,
    *,
    known: Sequence[Fault] = (),
    is_run: bool = True,
) -> ClusterPlan:
    """Compose every role of a cluster and check them, each alone and against one another.

    Args:
        overrides: of the cluster's command line.
        cfg: what they compose to.
        known: faults that were found in `cfg`, which need not be told again.
        is_run: the ranks will share this host's memory and cores.
    """
    faults = list(unusable_words(cfg))
    broken = {fault.key for fault in faults}
    own = {
        role: own_words(cfg, role) if f"cluster.{role}_overrides" not in broken else []
        for role in ROLES
    }
    words = {role: role_words(overrides, role, own[role]) for role in ROLES}
    checks, warnings = _check_roles(words, own, check)
    if is_run and not faults and not any(found.faults for found in checks):
        shares = _shares(cfg, checks)
        words = {role: role_words(overrides, role, own[role], shares=shares) for role in ROLES}
        checks, warnings = _check_roles(words, own, check)
    configs = {found.role: found.config for found in checks}
    faults += merged_faults(checks, [*known, *faults])
    faults += pair_faults(configs, own)
    if not any(fault.key.startswith("disagg.") for fault in known):
        faults += port_faults(cfg, configs, own)
    return ClusterPlan(words=words, configs=configs, faults=faults, warnings=warnings)


def _check_roles(
    words: dict[str, list[str]], own: dict[str, list[str]], check: CheckRole
) -> tuple[list[RoleCheck], list[Fault]]:
    checks: list[RoleCheck] = []
    warnings: list[Fault] = []
    for role in ROLES:
        faults, found, config = check(words[role])
        checks.append(
            RoleCheck(role=role, words=words[role], own=own[role], faults=faults, config=config)
        )
        if role != ROUTER:  # what it does not read is there for the others
            warnings += [w for w in found if not _is_for_others(w, role, own[role])]
    return checks, list(dict.fromkeys(warnings))


def _is_for_others(warning: Fault, role: str, own: Sequence[str]) -> bool:
    """A key of the whole cluster, which another role reads, or the cluster has told of."""
    is_own = any(key_of(word) == warning.key for word in own)
    return warning.problem.startswith(f"{NO_EFFECT} in +role={role}") and not is_own


def _shares(cfg: InferenceConfig, checks: Sequence[RoleCheck]) -> Shares:
    configs = {found.role: found.config for found in checks if found.role in INSTANCES}
    allowed = len(os.sched_getaffinity(0))
    num_cores = min(allowed, psutil.cpu_count(logical=False) or allowed)
    return shares_of_host(cfg, configs, memory=available_memory(), num_cores=num_cores)
