"""Whether a rank's weights and KV cache fit into the memory of this machine. Torch-free."""

from typing import Any

from inferkit.config.faults import Fault, Findings, Fix
from inferkit.config.resolve import CPU_PLATFORM
from inferkit.config.schema import InferenceConfig
from inferkit.config.shares import RankShare
from inferkit.core.host import available_memory
from inferkit.core.parallel_layout import ParallelLayout


def rank_share(resolved: InferenceConfig, arch: Any) -> RankShare:
    """What a rank holds of a model of this shape."""
    layout = ParallelLayout.of(resolved.parallel)
    return RankShare(arch=arch, layout=layout, dtype=resolved.model.dtype.value)


def check_memory(resolved: InferenceConfig, arch: Any, findings: Findings) -> None:
    """A fault where the model cannot run, a warning where requests will have to wait.

    Only on a CPU, whose memory the ranks of a node share, or where platform.device_memory is
    given; else the worker asks its device.
    """
    memory, num_ranks = resolved.platform.device_memory, resolved.parallel.ranks_per_node
    if not memory and resolved.platform._target_ == CPU_PLATFORM:
        memory = (available_memory() or 0) // num_ranks
    if not memory:
        return
    share = rank_share(resolved, arch)
    weights = share.weight_bytes
    if weights > memory:
        findings.faults.append(_too_big(resolved, weights, memory))
        return
    block_size = resolved.kv_cache.block_size
    per_block = share.kv_bytes_per_token * block_size
    if resolved.kv_cache.num_blocks:
        _check_pool(resolved, per_block, memory - weights, findings)
        return
    room = int((memory - weights) * resolved.kv_cache.mem_fraction)
    longest = cached_len(resolved, arch)
    blocks = -(-longest // block_size)
    if (blocks + 1) * per_block > room:
        fitting = max(0, room // per_block - 1) * block_size
        findings.refuse(
            "engine.max_model_len",
            resolved.engine.max_model_len,
            f"the KV cache of one request takes {mib(blocks * per_block)}, but beside the weights "
            f"({mib(weights)}) only {mib(room)} are available; {fitting} tokens fit",
            related=("kv_cache.block_size", "kv_cache.mem_fraction", "data.input_truncated_len"),
        )
    elif resolved.batch_size_per_dp_rank * blocks * per_block > room:
        at_once = room // (blocks * per_block)
        findings.warn(
            "scheduler.batch_size",
            resolved.scheduler.batch_size,
            f"the KV cache holds {at_once} requests of engine.max_model_len="
            f"{resolved.engine.max_model_len} at once; others wait",
        )


def _too_big(resolved: InferenceConfig, weights: int, memory: int) -> Fault:
    dtype, world_size = resolved.model.dtype.value, resolved.parallel.world_size
    if world_size == 1:
        problem = (
            f"its weights take {mib(weights)} in {dtype}, but only {mib(memory)} are available"
        )
        choose = "choose a smaller model or model.dtype"
    else:
        problem = (
            f"its weights take {mib(weights)} in {dtype} on each of {world_size} ranks, but only "
            f"{mib(memory)} are available to a rank"
        )
        choose = "choose a smaller model or model.dtype, or another parallel=<option>"
    return Fault(key="model", problem=f"{problem}; {choose}", related=("platform.device_memory",))


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
