"""What follows from a configuration for the KV cache of a rank: bytes, blocks, requests."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from inferkit.config.memory import cached_len
from inferkit.config.schema import InferenceConfig
from inferkit.config.shares import RankShare
from inferkit.core.cache_spec import DTYPE_BYTES
from inferkit.inspect.snapshot import Derived
from inferkit.inspect.wording import size_text


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """Blocks of a rank."""

    blocks: int
    formula: str
    is_at_most: bool = False
    """Memory was not looked at."""
    is_recorded: bool = False


def kv_cache_values(
    config: InferenceConfig,
    share: RankShare,
    *,
    memory: int,
    num_blocks: Mapping[str, int] | None = None,
) -> Iterator[Derived]:
    """Memory is taken in whole blocks; the null block is one more.

    Args:
        memory: bytes of a rank; 0 = not known.
        num_blocks: pool -> the blocks that a run had; None = it has not run.
    """
    kv_cache, batch = config.kv_cache, config.batch_size_per_dp_rank
    block_size, per_token = kv_cache.block_size, share.kv_bytes_per_token
    yield Derived(
        name="rank.kv_bytes_per_token",
        value=per_token,
        formula=_kv_formula(config, share),
        unit="bytes",
    )
    block_bytes = per_token * block_size
    yield Derived(
        name="kv_cache.block_bytes",
        value=block_bytes,
        formula=f"rank.kv_bytes_per_token * kv_cache.block_size = {per_token:,} * {block_size}",
        unit="bytes",
        text=size_text(block_bytes),
    )
    length = cached_len(config, share.arch)
    if not length:
        return  # the longest request is known once the model's files are here
    of_request = -(-length // block_size)
    yield Derived(
        name="kv_cache.blocks_per_request",
        value=of_request,
        formula=f"{_longest(config, length)} / kv_cache.block_size, rounded up = "
        f"{length} / {block_size}",
        unit="blocks",
    )
    kept = 2 if kv_cache.enable_prefix_cache else 1
    wanted = batch * of_request * kept + 1
    doubled = " * 2 for the prefix cache" if kept == 2 else ""
    numbers = f"{batch} * {of_request}" + (" * 2" if kept == 2 else "") + " + 1"
    yield Derived(
        name="kv_cache.blocks_wanted",
        value=wanted,
        formula=f"batch_size_per_dp_rank * blocks_per_request{doubled} + the null block"
        f" = {numbers}",
        unit="blocks",
    )
    if num_blocks:
        pool = _recorded(num_blocks, wanted)
    else:
        pool = _planned(config, share, wanted, block_bytes, memory)
    blocks = pool.blocks
    yield Derived(
        name="kv_cache.blocks",
        value=blocks,
        formula=pool.formula,
        unit="blocks",
        is_at_most=pool.is_at_most,
        is_recorded=pool.is_recorded,
    )
    if num_blocks and len(num_blocks) > 1:
        return  # blocks of several sizes
    yield Derived(
        name="kv_cache.pool_bytes",
        value=blocks * block_bytes,
        formula=f"kv_cache.blocks * block_bytes = {blocks} * {block_bytes:,}",
        unit="bytes",
        text=size_text(blocks * block_bytes),
        is_at_most=pool.is_at_most,
        is_recorded=pool.is_recorded,
    )
    at_once, dp_size = min(batch, max(0, blocks - 1) // of_request), config.parallel.attn_dp_size
    yield Derived(
        name="kv_cache.concurrent_requests",
        value=at_once * dp_size,
        formula="min(batch_size_per_dp_rank, (kv_cache.blocks - 1) / blocks_per_request)"
        f" * attn_dp_size = min({batch}, {blocks - 1} / {of_request}) * {dp_size}",
        unit="requests",
        is_at_most=pool.is_at_most,
        is_recorded=pool.is_recorded,
    )


def _kv_formula(config: InferenceConfig, share: RankShare) -> str:
    """In the numbers of the architecture, where they explain the value."""
    arch, heads = share.arch, share.heads
    size = DTYPE_BYTES[config.model.dtype.value]
    layers = int(getattr(arch, "num_hidden_layers", 0) or 0)
    if share.has_latent:
        latent, rope = int(arch.kv_lora_rank), int(getattr(arch, "qk_rope_head_dim", 0))
        text = "layers * (latent + rotated part) * bytes"
        text += f" = {layers} * ({latent} + {rope}) * {size}"
        value = layers * (latent + rope) * size
    else:
        dim = int(getattr(arch, "head_dim", 0) or 0)
        count = heads.num_local_kv_heads if heads is not None else 0
        text = "layers * (keys and values) * rank.kv_heads * head_dim * bytes"
        text += f" = {layers} * 2 * {count} * {dim} * {size}"
        value = layers * 2 * count * dim * size
    is_whole = value == share.kv_bytes_per_token
    return text if is_whole else "over all layers of the rank that holds most"


def _recorded(num_blocks: Mapping[str, int], wanted: int) -> _Pool:
    """As the ranks of a run have sized their pools."""
    total = sum(num_blocks.values())
    if len(num_blocks) > 1:
        parts = " + ".join(f"{name} {count:,}" for name, count in num_blocks.items())
        formula = f"recorded by the run, of several pools: {parts}"
    else:
        why = "" if total >= wanted else f", less than the {wanted:,} wanted"
        formula = f"recorded by the run{why}"
    return _Pool(blocks=total, formula=formula, is_recorded=True)


def _planned(
    config: InferenceConfig, share: RankShare, wanted: int, block_bytes: int, memory: int
) -> _Pool:
    """Blocks of a rank's pool, as far as this can be said before the device is asked."""
    kv_cache = config.kv_cache
    if kv_cache.num_blocks:
        return _Pool(blocks=kv_cache.num_blocks, formula="kv_cache.num_blocks")
    if not memory:
        formula = "blocks_wanted; memory is not looked at, see platform.device_memory"
        return _Pool(blocks=wanted, formula=formula, is_at_most=True)
    is_given = memory == config.platform.device_memory
    of_rank = "platform.device_memory" if is_given else "memory that a rank has here"
    room = int((memory - share.weight_bytes) * kv_cache.mem_fraction)
    formula = (
        f"what is wanted and fits into ({of_rank} - rank.weight_bytes) * mem_fraction"
        f" = min({wanted}, {room:,} / {block_bytes:,})"
    )
    return _Pool(blocks=min(wanted, max(0, room // block_bytes)), formula=formula)


def _longest(config: InferenceConfig, length: int) -> str:
    if length == config.engine.max_model_len:
        return "engine.max_model_len"
    return "tokens of the longest request that a layer keeps on average, windows included"
