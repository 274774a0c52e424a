"""Rules of the `parallel` node: sizes that divide, nodes that are all there."""

import math
import re
from typing import Any

from inferkit.config.faults import Findings, Fix, show
from inferkit.config.schema import InferenceConfig, ParallelConfig
from inferkit.core.parallel_layout import TP_SIZES, LayoutFault, layout_faults

SIZES = (*(f"{kind}_tp_size" for kind in TP_SIZES), "cp_size")
COMMON_PORT = 29500
"""Torch's own choice; an example for a user who has none."""
MAX_PORT = 65535
MAX_WORLD_SIZE = 65536
"""Every rank lists the members of its groups."""
OPTION = re.compile(r"(?:tp|dp|ep|cp)[1-9]\d{0,5}|dp[1-9]\d{0,5}tp[1-9]\d{0,5}")
"""Names that an option of conf/parallel may have; a file is there for the common ones."""


def sizes_named(option: str) -> dict[str, int]:
    """Sizes other than 1 that an option of this name sets; none where it is no such name.

    tpN: every layer on N ranks. epN: so too, but whole experts on each. dpN: N copies, experts
    spread over all. dpDtpT: D sets of T ranks. cpN: prompts divided among N ranks.
    """
    if OPTION.fullmatch(option) is None:
        return {}
    named = {kind: int(size) for kind, size in re.findall(r"([a-z]+)(\d+)", option)}
    tp_size = named.get("tp") or named.get("ep") or 1
    kinds = [kind for kind in TP_SIZES if kind != "moe" or named.keys() == {"tp"}]
    sizes = {
        "world_size": named.get("dp", 1) * tp_size * named.get("cp", 1),
        **{f"{kind}_tp_size": tp_size for kind in kinds},
        "cp_size": named.get("cp", 1),
    }
    return {name: size for name, size in sizes.items() if size > 1}


def layout(cfg: InferenceConfig, findings: Findings) -> None:
    """The sizes must make a layout; all other rules count on it."""
    parallel = cfg.parallel
    if parallel.world_size > MAX_WORLD_SIZE:
        problem = f"is out of range; allowed is 1 to {MAX_WORLD_SIZE}"
        findings.refuse(
            "parallel.world_size",
            parallel.world_size,
            problem,
            fix=Fix(drop=("parallel", "parallel.world_size")),
        )
        return
    faults = list(layout_faults(parallel))
    for fault in faults:
        problem = fault.problem
        if _is_too_big(parallel, fault):
            problem += f"; or set parallel.world_size to a multiple of {fault.value}"
        fix = _fix(parallel, fault, faults)
        findings.refuse(f"parallel.{fault.size}", fault.value, problem, fix=fix)


def _is_too_big(parallel: ParallelConfig, fault: LayoutFault) -> bool:
    """Whether another world would do for this size."""
    return fault.size in SIZES and fault.value >= 1 and parallel.world_size % fault.value != 0


def _fix(parallel: ParallelConfig, fault: LayoutFault, faults: list[LayoutFault]) -> Fix:
    """One size is brought to fit the world; the world is, where it fits several not at all."""
    world, size = parallel.world_size, fault.value
    too_big = [other for other in faults if _is_too_big(parallel, other)]
    in_doubt = len(too_big) > 1 or size > world
    if fault.size == "world_size" or (fault in too_big and in_doubt):
        sizes = [getattr(parallel, name) for name in SIZES]
        return Fix(add=(f"parallel.world_size={math.lcm(*(n for n in sizes if n >= 1))}",))
    if size < 1 or world % size:
        use = max(n for n in range(1, max(size, 1) + 1) if world % n == 0)
    elif fault.size == "cp_size":
        use = world
    elif fault.size == "attn_tp_size":
        use = 1
    else:
        use = parallel.attn_tp_size
    return Fix(add=(f"parallel.{fault.size}={use}",))


def nodes(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    """node_ips, devices_per_node and master_port among each other and with the world.

    A router has no ranks: where it has a split, that came with the experiment of its model.
    """
    parallel = cfg.parallel
    if cfg.role == "router":
        return
    _addresses(parallel, findings)
    _devices_per_node(cfg, findings)
    port, is_several = parallel.master_port, len(parallel.node_ips) > 1
    key = "parallel.master_port"
    if not 0 <= port <= MAX_PORT:
        problem = f"is out of range; allowed is 0 (a free one is chosen) to {MAX_PORT}"
        findings.refuse(key, port, problem, use=COMMON_PORT if is_several else 0)
    elif is_several and port == 0:
        problem = "several nodes cannot choose a free port together; set one that is free on "
        related = ("parallel.node_ips", "parallel.world_size")
        problem += parallel.node_ips[0]
        findings.refuse(key, port, problem, use=COMMON_PORT, related=related)


def _addresses(parallel: ParallelConfig, findings: Findings) -> None:
    ips = parallel.node_ips
    known = [ip for ip in dict.fromkeys(ips) if ip.strip()]
    if known != ips:
        problem = "must name every node once, the master first"
        findings.refuse("parallel.node_ips", ips, problem, use=known)


def _devices_per_node(cfg: InferenceConfig, findings: Findings) -> None:
    parallel = cfg.parallel
    world, per_node = parallel.world_size, parallel.devices_per_node
    listed = f"{cfg.role}_ips" if cfg.role in ("prefill", "decode") else ""
    num_nodes = max(1, len(parallel.node_ips))
    key, related = "parallel.devices_per_node", ("parallel.world_size", "parallel.node_ips")

    def refuse(problem: str, use: Any) -> None:
        findings.refuse(key, per_node, problem, use=use, related=related)

    if per_node < 0:
        refuse("is out of range; allowed is 0 (all on this node) or >= 1", 0)
    elif num_nodes > 1 and world % num_nodes:
        problem = f"ranks do not divide among the {num_nodes} nodes of parallel.node_ips; "
        problem += f"allowed is a multiple of {num_nodes}, or another number of nodes"
        kept = max(n for n in range(1, num_nodes) if world % n == 0)
        fix = Fix(add=(f"parallel.node_ips={show(parallel.node_ips[:kept])}",))
        if per_node:
            fix = Fix(add=(f"parallel.world_size={num_nodes * per_node}",))
        findings.refuse("parallel.world_size", world, problem, fix=fix, related=related[1:])
    elif num_nodes > 1 and per_node * num_nodes != world:
        share = world // num_nodes
        problem = f"world_size={world} is {share} on each of the {num_nodes} nodes of "
        refuse(f"{problem}parallel.node_ips; allowed is {share}", share)
    elif per_node > world:
        problem = f"is more than world_size={world}; allowed is {world}, or 0 (all on this node)"
        refuse(problem, 0)
    elif listed and per_node and world % per_node:
        problem = f"must divide world_size={world}, or be 0 (all on this node)"
        refuse(problem, max(n for n in range(1, per_node + 1) if world % n == 0))
    elif listed and getattr(cfg.disagg, listed):
        return  # instances of several nodes each, which follow one another in the list
    elif num_nodes == 1 and per_node not in (0, world):
        key_of_list = f"disagg.{listed}" if listed else "parallel.node_ips"
        refuse(
            f"world_size={world} takes {-(-world // per_node)} nodes of {per_node} ranks: list "
            f"their addresses in {key_of_list}, the master first; allowed is "
            f"{world}, or 0 (all on this node)",
            0,
        )


def context_parallel(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    if cfg.parallel.cp_size > 1 and cfg.kv_cache.enable_prefix_cache:
        findings.refuse(
            "kv_cache.enable_prefix_cache",
            True,
            f"is not available with context parallelism (parallel.cp_size={cfg.parallel.cp_size})",
            use=False,
            related=("parallel.cp_size",),
        )
