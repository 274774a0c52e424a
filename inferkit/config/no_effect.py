"""Options that have no effect: who reads each key of the schema, and when it is not read at all.

An option that nobody reads in the chosen mode is a fault where it can only be a mistake (the port
of another role), and a warning where a command, an experiment or a sweep may well share it among
modes. Only keys that have another value than the schema's are told of; an option of conf/ sets
nothing that its own role does not read.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, TypeVar

from omegaconf import MISSING

from inferkit.config.faults import Fault, Findings, Fix
from inferkit.config.network_rules import SHARED_MEMORY
from inferkit.config.resolve import CPU_PLATFORM
from inferkit.config.schema import InferenceConfig
from inferkit.config.shares import num_experts

Found = TypeVar("Found")

NO_EFFECT: Final = "has no effect"
EAGER = "eager"
OFFLINE: Final = "offline"
"""A run without a role."""
SERVE, PREFILL, DECODE, ROUTER, CLUSTER = "serve", "prefill", "decode", "router", "cluster"
HALVES = frozenset({PREFILL, DECODE, CLUSTER})
INSTANCES = HALVES | {SERVE}
"""Roles that run a model, or start instances that do."""
RANKS = INSTANCES | {OFFLINE}
ALL = RANKS | {ROUTER}

READERS: Mapping[str, frozenset[str]] = {
    "role": ALL,
    "allowed_targets": ALL,
    "data.dataset": frozenset({OFFLINE}),
    "data.dataset_path": frozenset({OFFLINE}),
    "data.input_truncated_len": frozenset({OFFLINE}),
    "data.limit": frozenset({OFFLINE}),
    "data.run_seed": frozenset({OFFLINE}),
    "data": ALL,
    "model._target_": ALL,
    "model.name": ALL,
    "model.path": ALL,
    "model.arch": ALL,
    "model.with_ckpt": ALL,
    "model": RANKS,
    "platform": RANKS,
    "parallel": RANKS,
    "engine.max_model_len": ALL,
    "engine": RANKS,
    "kv_cache.enable_prefix_cache": RANKS - {DECODE},
    "kv_cache.host_bytes": frozenset({DECODE, CLUSTER}),
    "kv_cache": RANKS,
    "exe_mode.batch_buckets": RANKS - {PREFILL},
    "exe_mode": RANKS,
    "scheduler.enable_chunked_prefill": RANKS - {DECODE},
    "scheduler.max_new_tokens": ALL,
    "scheduler.num_reserved_decode_tokens": frozenset({DECODE}),
    "scheduler": RANKS,
    "disagg.mode": ALL,
    "disagg.prefill_ips": frozenset({PREFILL, DECODE}),
    "disagg.decode_ips": frozenset({PREFILL, DECODE}),
    "disagg.bootstrap_port": frozenset({PREFILL, DECODE}),
    "disagg.http_host": frozenset({SERVE, PREFILL, DECODE}),
    "disagg.http_port": frozenset({SERVE, PREFILL, DECODE}),
    "disagg.zmq_port": frozenset({SERVE, PREFILL, DECODE}),
    "disagg.router_url": frozenset({PREFILL, DECODE}),
    "disagg.secret_env": HALVES | {ROUTER},
    "disagg.register_interval_s": frozenset({PREFILL, CLUSTER}),
    "disagg.handshake_timeout_s": frozenset({PREFILL, CLUSTER}),
    "disagg.stash_s": frozenset({PREFILL, CLUSTER}),
    "disagg.transfer_timeout_s": frozenset({DECODE, CLUSTER}),
    "disagg.fence_timeout_s": frozenset({DECODE, CLUSTER}),
    "disagg.heartbeat_interval_s": frozenset({DECODE, CLUSTER}),
    "disagg.heartbeat_misses": frozenset({DECODE, CLUSTER}),
    "disagg": HALVES,
    "router.prefill_urls": frozenset({ROUTER}),
    "router.decode_urls": frozenset({ROUTER}),
    "router.request_timeout_s": INSTANCES | {ROUTER},
    "router": frozenset({ROUTER, CLUSTER}),
    "cluster": frozenset({CLUSTER}),
    "load": ALL,
    "sweep": ALL,
    "runner": ALL,
}
"""Key, or a node for all others in it -> the roles that read it. A cluster reads what one of its
roles does, and hands it on to those that do. `load` and `sweep` have rules of their own: they are
read by a runner, and by the sweep as a whole. `scheduler.fixed_steps` is refused by every role."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """A configuration and how it is used."""

    cfg: InferenceConfig
    """As composed."""
    resolved: InferenceConfig
    """The same with automatic values as what they became."""
    arch: Any = None
    """The architecture of the model; None = not known yet."""


@dataclass(frozen=True, kw_only=True)
class Unread:
    """Keys that are not read where another one has a certain value."""

    keys: tuple[str, ...]
    holds: Callable[[Use], bool]
    reason: str
    """Follows "has no effect"."""
    is_fault: bool = False
    needs_model: bool = False
    """`holds` looks at the model; told only where the key stands on the command line, for the
    options of conf/parallel set it for every model."""


def _is_greedy(use: Use) -> bool:
    """In a role a request may ask for another temperature."""
    return use.cfg.role is None and use.cfg.data.temperature == 0


def _splits_no_experts(use: Use, name: str) -> bool:
    """Where it is the size of every layer, it is written with the others."""
    parallel = use.cfg.parallel
    return not num_experts(use.arch) and getattr(parallel, name) != parallel.attn_tp_size


UNREAD: tuple[Unread, ...] = (
    Unread(
        keys=("data.top_p", "data.top_k", "data.min_p"),
        holds=_is_greedy,
        reason="with data.temperature=0 (greedy)",
    ),
    Unread(
        keys=("data.seed",),
        holds=lambda use: _is_greedy(use) and use.cfg.model.with_ckpt,
        reason="with data.temperature=0 (greedy) and weights from files",
    ),
    Unread(
        keys=("data.run_seed",),
        holds=lambda use: _is_greedy(use) or use.cfg.data.seed is not None,
        reason="unless data.temperature > 0 and data.seed=null",
    ),
    Unread(
        keys=("model.loader._target_", "model.loader.params"),
        holds=lambda use: not use.cfg.model.with_ckpt,
        reason="with random weights (model.with_ckpt=false)",
    ),
    Unread(
        keys=("platform.version",),
        holds=lambda use: use.resolved.platform._target_ == CPU_PLATFORM,
        reason="on a CPU: it names the generation of an Ascend device",
        is_fault=True,
    ),
    Unread(
        keys=("parallel.master_port",),
        holds=lambda use: use.cfg.parallel.world_size == 1,
        reason="with one rank, which meets no other",
    ),
    Unread(
        keys=("kv_cache.mem_fraction",),
        holds=lambda use: use.cfg.kv_cache.num_blocks > 0,
        reason="with kv_cache.num_blocks, which sizes the pool",
    ),
    Unread(
        keys=(
            "exe_mode.enable_cache_compile",
            "exe_mode.enable_static_kernel",
            "exe_mode.enable_dynamic_graph",
        ),
        holds=lambda use: use.cfg.exe_mode.name == EAGER,
        reason="in eager mode, which compiles no graph",
        is_fault=True,
    ),
    Unread(
        keys=("disagg.write_timeout_s",),
        holds=lambda use: use.cfg.disagg.transfer._target_ == SHARED_MEMORY,
        reason="with shared memory, whose writes wait for no connection",
    ),
    *(
        Unread(
            keys=(f"parallel.{name}",),
            holds=lambda use, name=name: _splits_no_experts(use, name),  # type: ignore[misc]
            reason="with this model, which has no experts",
            needs_model=True,
        )
        for name in ("moe_tp_size", "shared_tp_size")
    ),
)
REASONS: Mapping[str, str] = {
    "data": "prompts come by HTTP",
    "kv_cache.host_bytes": "only a decode role keeps retracted requests in host memory",
    "kv_cache.enable_prefix_cache": "it computes no prompts",
    "scheduler.enable_chunked_prefill": "it computes no prompts",
    "exe_mode.batch_buckets": "it runs no decode batches",
}
"""Why a role does not read a key; for some."""
MISTAKES = frozenset({"disagg", "router", "cluster", "kv_cache.host_bytes"})
"""Keys, and nodes, of what only some roles do: for another role they are a fault."""
MAX_NAMED = 2
"""More keys of a node than these are told as the node."""


def no_effect(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    """Name every option that is set and that nothing reads; the model is not known yet."""
    role = cfg.role or OFFLINE
    where = f"in +role={cfg.role}" if cfg.role else "without a role"
    faulty = {fault.key for fault in findings.faults}
    unread_by_router: list[str] = []
    for key, value in changed_keys(cfg):
        if key in faulty:
            continue
        reason = _of(key, REASONS) or ""
        problem = f"{NO_EFFECT} {where}" + (f": {reason}" if reason else "")
        if role in readers(key):
            _unread(Use(cfg=cfg, resolved=resolved), key, value, findings)
        elif _of(key, dict.fromkeys(MISTAKES, True)) and not _is_of_other_half(key, role):
            chosen = _only_reader(key) if role == OFFLINE else None
            fix = Fix(add=(f"+role={chosen}",)) if chosen else Fix(drop=(key,))
            problem += f"; choose +role={chosen}" if chosen else ""
            findings.refuse(key, value, problem, fix=fix)
        elif role == ROUTER and not key.startswith("data."):
            unread_by_router.append(key)
        else:
            findings.warn(key, value, problem)
    if unread_by_router:
        problem = f"{NO_EFFECT} in +role=router: its instances have their own"
        findings.warnings.append(Fault(key=_listed(unread_by_router), problem=problem))


def no_effect_of_model(use: Use, findings: Findings, given: Collection[str]) -> None:
    """The same for what depends on the model.

    Args:
        given: keys of the command line.
    """
    for key, value in changed_keys(use.cfg):
        if key in given and (use.cfg.role or OFFLINE) in readers(key):
            _unread(use, key, value, findings)


def readers(key: str) -> frozenset[str]:
    """The roles that read a key."""
    return _of(key, READERS) or ALL


def changed_keys(cfg: InferenceConfig) -> Iterator[tuple[str, Any]]:
    """(key, value) of every key whose value is not the schema's; choices are no such keys."""
    for key, value, default in _with_defaults("", cfg):
        if value != default and default != MISSING and key != "role":
            yield key, value


def _unread(use: Use, key: str, value: Any, findings: Findings) -> None:
    for entry in UNREAD:
        if key not in entry.keys or entry.needs_model != (use.arch is not None):
            continue
        if entry.holds(use):
            problem = f"{NO_EFFECT} {entry.reason}"
            if entry.is_fault:
                findings.refuse(key, value, problem, drop=True)
            else:
                findings.warn(key, value, problem)


def _only_reader(key: str) -> str | None:
    """The role that a key is for, where it is one alone."""
    roles = readers(key)
    return next(iter(roles)) if len(roles) == 1 else None


def _is_of_other_half(key: str, role: str) -> bool:
    """Prefill and decode may share a command line."""
    return role in (PREFILL, DECODE) and bool(readers(key) & {PREFILL, DECODE})


def _of(key: str, table: Mapping[str, Found]) -> Found | None:
    """The entry of the key, or of the nearest node that holds it."""
    while key and key not in table:
        key = key.rpartition(".")[0]
    return table.get(key)


def _with_defaults(prefix: str, node: Any) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, the schema's value) of every key, in nested nodes too."""
    default = type(node)()
    for entry in fields(node):
        key = f"{prefix}{entry.name}"
        value = getattr(node, entry.name)
        if is_dataclass(value):
            yield from _with_defaults(f"{key}.", value)
        else:
            yield key, value, getattr(default, entry.name)


def _listed(keys: Sequence[str]) -> str:
    """Keys, and nodes of which there are many."""
    by_node: dict[str, list[str]] = {}
    for key in keys:
        by_node.setdefault(key.partition(".")[0], []).append(key)
    told = (names if len(names) <= MAX_NAMED else [f"{node}.*"] for node, names in by_node.items())
    return ", ".join(name for names in told for name in names)
