"""Whether a rank's weights and KV cache fit into the memory that it has. Torch-free."""

from dataclasses import dataclass, fields, replace
from typing import Any

from inferkit.config.faults import Fault, Findings, Fix
from inferkit.config.model_files import is_shape_only
from inferkit.config.resolve import CPU_PLATFORM
from inferkit.config.schema import InferenceConfig, ParallelConfig
from inferkit.config.shares import RankShare
from inferkit.core.host import available_memory
from inferkit.core.parallel_layout import ParallelLayout

TP_SIZES_OF_OPTIONS = (2, 4, 8, 16, 32)
"""Options tpN of conf/parallel."""


def rank_share(resolved: InferenceConfig, arch: Any) -> RankShare:
    """What a rank holds of a model of this shape."""
    layout = ParallelLayout.of(resolved.parallel)
    return RankShare(arch=arch, layout=layout, dtype=resolved.model.dtype.value)


def check_memory(
    resolved: InferenceConfig,
    arch: Any,
    findings: Findings,
    *,
    is_run: bool = True,
    asks_host: bool = True,
) -> int:
    """A fault where the model cannot run, a warning where requests will have to wait.

    Only on a CPU, whose memory the ranks of a node share, or where platform.device_memory is
    given; else the worker asks its device. A run needs that memory here; without one it may be
    another machine's, and a shape that nothing can run here is not refused for this one. With
    `asks_host=False` this machine's does not count at all. A router runs no model, and the
    instances of a cluster are checked one by one.

    Returns:
        Bytes of a rank that its KV cache was planned with; 0 = memory was not looked at.
    """
    if resolved.role in ("router", "cluster"):
        return 0
    if resolved.kv_cache.num_blocks:
        _warn_of_small_pool(resolved, arch, resolved.kv_cache.num_blocks, findings)
    planned, here = resolved.platform.device_memory, _memory_here(resolved) if asks_host else 0
    if is_run and here and planned > here:
        note = f"; platform.device_memory={planned} is more than this machine has"
        limit = Limit(size=here, note=note)
    elif planned:
        limit = Limit(size=planned)
    else:
        note = "; platform.device_memory=BYTES checks it against another machine"
        limit = Limit(size=here, note=note if is_shape_only(resolved) else "")
    if not limit.size:
        return 0
    found = Findings()
    _check_sizes(resolved, arch, limit, found)
    findings.warnings += found.warnings
    if is_shape_only(resolved) and not planned:
        findings.warnings += found.faults
        return 0 if found.faults else limit.size
    findings.faults += found.faults
    return limit.size


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Memory of one rank."""

    size: int
    """Bytes; 0 = unknown."""
    note: str = ""
    """What a message says of it, after the numbers."""


def _memory_here(resolved: InferenceConfig) -> int:
    """What this machine has for each of its ranks, in bytes; 0 = not known before the run."""
    if resolved.platform._target_ != CPU_PLATFORM:
        return 0
    return (available_memory() or 0) // resolved.parallel.ranks_per_node


def _check_sizes(resolved: InferenceConfig, arch: Any, limit: Limit, findings: Findings) -> None:
    share = rank_share(resolved, arch)
    weights = share.weight_bytes
    if weights > limit.size:
        fix = None
        if resolved.platform.device_memory:
            fix = _more_ranks(resolved, arch, limit) or Fix(drop=("platform.device_memory",))
        findings.faults.append(_too_big(resolved, weights, limit, fix))
        return
    block_size = resolved.kv_cache.block_size
    per_block = share.kv_bytes_per_token * block_size
    if resolved.kv_cache.num_blocks:
        _check_pool(resolved, per_block, limit.size - weights, findings)
        return
    room = int((limit.size - weights) * resolved.kv_cache.mem_fraction)
    longest = cached_len(resolved, arch)
    blocks = -(-longest // block_size)
    if (blocks + 1) * per_block > room:
        fitting = max(0, room // per_block - 1) * block_size
        findings.refuse(
            "engine.max_model_len",
            resolved.engine.max_model_len,
            f"the KV cache of one request takes {mib(blocks * per_block)}, but beside the weights "
            f"({mib(weights)}) only {mib(room)} are available; {fitting} tokens fit{limit.note}",
            use=fitting or None,
            related=("kv_cache.block_size", "kv_cache.mem_fraction", "data.input_truncated_len"),
        )
        return
    at_once = (room // per_block - 1) // blocks  # one block is the null block
    if resolved.batch_size_per_dp_rank > at_once:
        at_once *= resolved.parallel.attn_dp_size
        findings.warn(
            "scheduler.batch_size",
            resolved.scheduler.batch_size,
            f"the KV cache holds {at_once} requests of engine.max_model_len="
            f"{resolved.engine.max_model_len} at once; others wait",
        )


def _more_ranks(resolved: InferenceConfig, arch: Any, limit: Limit) -> Fix | None:
    """The smallest split of every layer of which a rank can hold its part; None = none can."""
    sizes = [entry.name for entry in fields(ParallelConfig) if entry.name.endswith("_tp_size")]
    for tp_size in TP_SIZES_OF_OPTIONS:
        values: dict[str, Any] = dict.fromkeys(sizes, tp_size)
        split = ParallelConfig(world_size=tp_size, **values)
        if rank_share(replace(resolved, parallel=split), arch).weight_bytes < limit.size:
            own = ("parallel.world_size", "parallel.cp_size", *(f"parallel.{n}" for n in sizes))
            return Fix(add=(f"parallel=tp{tp_size}",), drop=own)
    return None


def _too_big(resolved: InferenceConfig, weights: int, limit: Limit, fix: Fix | None) -> Fault:
    dtype, world_size = resolved.model.dtype.value, resolved.parallel.world_size
    if world_size == 1:
        problem = (
            f"its weights take {mib(weights)} in {dtype}, but only {mib(limit.size)} are available"
        )
        choose = "choose a smaller model or model.dtype, or parallel=<option> for more ranks"
    else:
        problem = (
            f"its weights take {mib(weights)} in {dtype} on each of {world_size} ranks, but only "
            f"{mib(limit.size)} are available to a rank"
        )
        choose = "choose a smaller model or model.dtype, or another parallel=<option>"
    return Fault(
        key="model",
        problem=f"{problem}; {choose}{limit.note}",
        fix=fix,
        related=("platform.device_memory",),
    )


def _check_pool(resolved: InferenceConfig, per_block: int, room: int, findings: Findings) -> None:
    num_blocks = resolved.kv_cache.num_blocks
    if num_blocks * per_block > room:
        fitting = room // per_block
        findings.faults.append(
            Fault(
                key="kv_cache.num_blocks",
                given=f"kv_cache.num_blocks={num_blocks}",
                problem=f"the pool takes {mib(num_blocks * per_block)}, but {mib(room)} are "
                f"available beside the weights; allowed is <= {fitting}, or 0 (automatic)",
                fix=Fix(add=("kv_cache.num_blocks=0",)),
                related=("kv_cache.block_size",),
            )
        )


def _warn_of_small_pool(
    resolved: InferenceConfig, arch: Any, num_blocks: int, findings: Findings
) -> None:
    """A pool of a size that was set, in which no request of the longest length has room."""
    length, block_size = cached_len(resolved, arch), resolved.kv_cache.block_size
    of_request = -(-length // block_size)
    if length and num_blocks - 1 < of_request:
        findings.warn(
            "kv_cache.num_blocks",
            num_blocks,
            f"a request of engine.max_model_len={resolved.engine.max_model_len} has no room: it "
            f"takes {of_request} blocks of {block_size} tokens beside the null block, so only "
            f"shorter ones run; set {of_request + 1} or more, or 0 (automatic)",
        )


def cached_len(resolved: InferenceConfig, arch: Any) -> int:
    """Tokens that the longest request keeps in the cache, over all layers on average."""
    limit = resolved.engine.max_model_len
    windows: tuple[int | None, ...] = getattr(arch, "layer_windows", ())
    kept = [
        limit if window is None else min(limit, window + resolved.kv_cache.block_size)
        for window in windows
    ]
    return sum(kept) // len(kept) if kept else limit


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes >= 2**20 else f"{num_bytes:,} bytes"
