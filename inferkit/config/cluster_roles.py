"""The roles of a cluster: the command line of each, and whether they fit one another.

A cluster is one host with a router, prefill and decode instances. Their overrides are those of the
cluster's own command line, then what belongs to one role alone.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inferkit.config.faults import Command, Fault, Fix, key_of, show
from inferkit.config.network_rules import ports
from inferkit.config.no_effect import readers
from inferkit.config.resolve import CPU_PLATFORM
from inferkit.config.schema import InferenceConfig
from inferkit.core.secrets import recorded

CLUSTER, ROUTER, PREFILL, DECODE = "cluster", "router", "prefill", "decode"
INSTANCES = (PREFILL, DECODE)
OWN_NODES = ("cluster", "router", "hydra", "runner", "role", "load", "sweep")
"""What the command line of a cluster says of these is not passed on to instances."""
UNREAD_BY_ROUTER = (
    "parallel",
    "kv_cache",
    "scheduler",
    "exe_mode",
    "platform",
    "disagg",
    "engine.warm_up",
)
FREE_PORTS: Mapping[str, tuple[str, ...]] = {
    PREFILL: ("disagg.http_port=0", "disagg.bootstrap_port=0", "disagg.zmq_port=0"),
    DECODE: ("disagg.http_port=0", "disagg.zmq_port=0"),
    ROUTER: ("router.prefill_urls=[]", "router.decode_urls=[]"),
}
EQUAL_KEYS: Mapping[str, tuple[str, ...]] = {
    "model": ("model.name", "model._target_"),
    "model_fingerprint": ("model.path", "model.arch", "model.with_ckpt", "data.seed"),
    "dtype": ("model.dtype",),
    "layout": ("platform._target_",),
    "block_size": ("kv_cache.block_size",),
    "transfer_engine": ("disagg.transfer._target_", "disagg.transfer.params"),
    "verify_digest": ("disagg.verify_digest",),
    "timers": ("disagg.lease_s",),
    "limits": ("engine.max_model_len", "disagg.secret_env"),
}
"""What prefill and decode must have in common -> the keys that decide it. The first seven are
fields of the layout that they compare when they meet; its other fields follow from the model."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What one rank may take of this host, where all ranks of a cluster share it; 0 = all."""

    device_memory: int = 0
    """Bytes."""
    num_threads: int = 0

    @property
    def overrides(self) -> list[str]:
        values = {
            "platform.device_memory": self.device_memory,
            "platform.num_threads": self.num_threads,
        }
        return [f"{key}={value}" for key, value in values.items() if value]


def role_words(
    overrides: Sequence[str], role: str, own: Sequence[str] = (), *, shares: Shares | None = None
) -> list[str]:
    """Overrides of one role of a cluster; later ones win.

    Args:
        overrides: of the cluster's command line.
        own: of this role alone.
    """
    given = [text for text in overrides if _is_passed_on(text, role)]
    added = [*FREE_PORTS[role], *(shares.overrides if shares and role != ROUTER else ())]
    words = {key_of(text): text for text in added}
    # Groups that are appended apply in the order of the command line, so the role keeps its place.
    words |= {key_of(t): f"+role={role}" if key_of(t) == "role" else t for t in given}
    words |= {key_of(text): text for text in own}
    return list(words.values())


def _is_passed_on(text: str, role: str) -> bool:
    key = key_of(text).replace("/", ".")  # a group is where its node is
    if role in INSTANCES and "." in key and role not in readers(key) and CLUSTER in readers(key):
        return False
    if key in ("role", "sweep", "hydra.verbose"):
        return True  # a file of conf/sweep (+sweep=NAME) sets keys of any node
    if role != ROUTER:
        return key.partition(".")[0] not in OWN_NODES
    if key.startswith("router."):
        return key not in ("router.prefill_urls", "router.decode_urls")
    if key in ("scheduler.max_new_tokens", "disagg.secret_env"):
        return True
    return not any(f"{key}.".startswith(f"{name}.") for name in (*OWN_NODES, *UNREAD_BY_ROUTER))


def own_words(cfg: InferenceConfig, role: str) -> list[str]:
    """The words of `cluster.<role>_overrides`, which take secrets from the environment themselves.

    Raises:
        ValueError: a quote is not closed.
    """
    text: str = recorded(getattr(cfg.cluster, f"{role}_overrides", ""))
    return shlex.split(text)


def unusable_words(cfg: InferenceConfig) -> Iterator[Fault]:
    """What is wrong with the `cluster` node itself."""
    for role in INSTANCES:
        count: int = getattr(cfg.cluster, role)
        if count < 1:
            key = f"cluster.{role}"
            problem = "is out of range; allowed is >= 1"
            fix = Fix(add=(f"{key}=1",))
            yield Fault(key=key, given=f"{key}={count}", problem=problem, fix=fix)
        key = f"cluster.{role}_overrides"
        given = f"{key}={show(getattr(cfg.cluster, f'{role}_overrides'))}"
        try:
            words = own_words(cfg, role)
        except ValueError as error:
            problem = f"cannot be read as words: {error}"
            yield Fault(key=key, given=given, problem=problem, fix=Fix(drop=(key,)))
            continue
        bad = {word: problem for word in words if (problem := _word_problem(word, role))}
        if bad:
            problem = "\n".join(f"{word} {why}" for word, why in bad.items())
            fix = _words_fix(role, [word for word in words if word not in bad])
            moved = tuple(word for word in bad if _is_of_cluster(word))
            yield Fault(
                key=key, given=given, problem=problem, fix=replace(fix, add=fix.add + moved)
            )


def _word_problem(word: str, role: str) -> str:
    if "=" not in word:
        return "is no override; write KEY=VALUE, with spaces between several"
    node = key_of(word).partition(".")[0]
    if node == "role":
        return f"chooses a role, which is {role} already"
    if _is_of_cluster(word):
        return f"belongs to the cluster, not to {role}; write it on the command line itself"
    return ""


def _is_of_cluster(word: str) -> bool:
    return key_of(word).partition(".")[0] in ("cluster", "router", "hydra")


@dataclass(frozen=True, kw_only=True)
class RoleCheck:
    """What the check of one role of a cluster has found."""

    role: str
    words: Sequence[str]
    own: Sequence[str]
    faults: Sequence[Fault]
    config: InferenceConfig


def merged_faults(checks: Sequence[RoleCheck], known: Sequence[Fault]) -> list[Fault]:
    """Faults of roles, each once with the roles that have it, without those that are `known`."""
    seen = {(fault.key, part) for fault in known for part in (fault.problem, fault.given)}
    of_roles: dict[tuple[str, str, str], list[RoleCheck]] = {}
    found: dict[tuple[str, str, str], Fault] = {}
    for check in checks:
        for fault in check.faults:
            if not seen & {(fault.key, fault.problem), (fault.key, fault.given or fault.key)}:
                identity = (fault.key, fault.given, fault.problem)
                of_roles.setdefault(identity, []).append(check)
                found[identity] = fault
    fixes = {check.role: _fixed_words(check) for check in checks}
    merged = []
    for identity, fault in found.items():
        holders = of_roles[identity]
        names = ", ".join(check.role for check in holders)
        fix: Fix | None = fault.fix
        own = [check for check in holders if _is_own(check, fault)]
        if own:
            parts = [part for check in own if (part := fixes[check.role]) is not None]
            is_example = any(part.is_example for part in parts)
            added = tuple(text for part in parts for text in part.add)
            dropped = tuple(key for part in parts for key in part.drop)
            fix = Fix(add=added, drop=dropped, is_example=is_example)
            fix = fix if len(parts) == len(own) else None
        given = f"{names}: {fault.given or fault.key}"
        merged.append(replace(fault, given=given, fix=fix, related=()))
    return merged


def _is_own(check: RoleCheck, fault: Fault) -> bool:
    keys = {key_of(text) for text in check.own}
    return any(f"{fault.key}.".startswith(f"{key}.") for key in keys)


def _fixed_words(check: RoleCheck) -> Fix | None:
    """`cluster.<role>_overrides=...` with all its faults cured; None = not known."""
    if check.role == ROUTER:
        return None
    faults = [fault for fault in check.faults if _is_own(check, fault)]
    fixes = [fault.fix for fault in faults if fault.fix is not None]
    if len(fixes) < len(faults):
        return None
    words = Command(overrides=tuple(check.own)).fixed(fixes).overrides
    is_example = any(fix.is_example for fix in fixes)
    return replace(_words_fix(check.role, words), is_example=is_example)


def _words_fix(role: str, words: Sequence[str]) -> Fix:
    """A role with these words of its own."""
    key = f"cluster.{role}_overrides"
    return Fix(add=(_as_override(role, words),)) if words else Fix(drop=(key,))


def _as_override(role: str, words: Sequence[str]) -> str:
    text = shlex.join(words).replace('"', '\\"')
    return f'cluster.{role}_overrides="{text}"'


def keys_to_be_equal(*, with_random_weights: bool) -> list[str]:
    """Keys and nodes that prefill and decode must have in common."""
    keys = [key for found in EQUAL_KEYS.values() for key in found]
    # Else the seed is of nothing that both must have.
    return [key for key in keys if key != "data.seed" or with_random_weights]


def pair_faults(
    configs: Mapping[str, InferenceConfig], own: Mapping[str, Sequence[str]]
) -> Iterator[Fault]:
    """Everything in which prefill, decode and router must not differ, and do.

    Args:
        own: words of each role alone; without those that make the difference, there is none.
    """
    router, prefill, decode = (configs[role] for role in (ROUTER, PREFILL, DECODE))
    for key in keys_to_be_equal(with_random_weights=not prefill.model.with_ckpt):
        left, right = _value(prefill, key), _value(decode, key)
        if left != right:
            yield Fault(
                key=key,
                given=f"{key}: prefill {show(left)}, decode {show(right)}",
                problem="prefill and decode hand KV over, so they must have the same; set it "
                "for both, outside cluster.prefill_overrides and cluster.decode_overrides",
                fix=_without(key, own),
            )
    for key in ("model.name", "model._target_", "model.path", "model.arch", "engine.max_model_len"):
        if _value(prefill, key) != _value(decode, key):
            continue
        left, right = _value(router, key), _value(prefill, key)
        if left != right:
            yield Fault(
                key=key,
                given=f"{key}: router {show(left)}, instances {show(right)}",
                problem="the router tokenises for the instances, so it must have the same; set it "
                "for all, outside cluster.prefill_overrides and cluster.decode_overrides",
                fix=_without(key, own),
            )


def _without(key: str, own: Mapping[str, Sequence[str]]) -> Fix | None:
    """No role has words of its own on `key`; None = none has."""
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    for role, words in own.items():
        kept = [word for word in words if not f"{key}.".startswith(f"{key_of(word)}.")]
        if len(kept) < len(words):
            fix = _words_fix(role, kept)
            added, dropped = added + fix.add, dropped + fix.drop
    return Fix(add=added, drop=dropped) if added or dropped else None


def port_faults(
    cfg: InferenceConfig,
    configs: Mapping[str, InferenceConfig],
    own: Mapping[str, Sequence[str]],
) -> Iterator[Fault]:
    """Fixed ports of instances, which all share this host.

    Args:
        own: words of each role alone.
    """
    users: dict[int, str] = {}
    for role, config in configs.items():
        for key, port in ports(config):
            count: int = getattr(cfg.cluster, role, 1)
            problem = ""
            if count > 1:
                problem = f"is one port for {count} instances"
            elif port in users:
                problem = f"is {users[port]} too"
            users.setdefault(port, f"{key} of {role}")
            if problem:
                yield Fault(
                    key=key if role == ROUTER else f"cluster.{role}_overrides",
                    given=f"{role}: {key}={port}",
                    problem=f"{problem}; leave it out (a free one is chosen)",
                    fix=_without(key, {role: own.get(role, ())}) or Fix(add=(f"{key}=0",)),
                )


def shares_of_host(
    cfg: InferenceConfig,
    configs: Mapping[str, InferenceConfig],
    *,
    memory: int | None,
    num_cores: int,
) -> Shares:
    """An equal part for every rank of every instance; a device's memory is its own.

    Args:
        memory: bytes that are available here; None = unknown.
    """
    if any(configs[role].platform._target_ != CPU_PLATFORM for role in INSTANCES):
        return Shares()
    num_ranks = sum(
        getattr(cfg.cluster, role) * configs[role].parallel.world_size for role in INSTANCES
    )
    share = (memory or 0) // num_ranks
    planned = max(configs[role].platform.device_memory for role in INSTANCES)
    has_threads = any(configs[role].platform.num_threads for role in INSTANCES)
    return Shares(
        device_memory=share if not planned or planned > share else 0,
        num_threads=0 if has_threads else max(1, num_cores // num_ranks),
    )


def _value(cfg: InferenceConfig, key: str) -> Any:
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value
