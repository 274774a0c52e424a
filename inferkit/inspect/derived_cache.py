"""What follows from a configuration for the KV cache of a rank: bytes, blocks, requests."""

from collections.abc import Iterator

from inferkit.config.memory import cached_len
from inferkit.config.schema import InferenceConfig
from inferkit.config.shares import RankShare
from inferkit.core.cache_spec import DTYPE_BYTES
from inferkit.inspect.snapshot import Derived
from inferkit.inspect.wording import size_text


def kv_cache_values(config: InferenceConfig, share: RankShare) -> Iterator[Derived]:
    """Memory is taken in whole blocks; the null block is one more."""
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
    blocks, formula = _pool(config, share, wanted, block_bytes)
    yield Derived(name="kv_cache.blocks", value=blocks, formula=formula, unit="blocks")
    yield Derived(
        name="kv_cache.pool_bytes",
        value=blocks * block_bytes,
        formula=f"kv_cache.blocks * block_bytes = {blocks} * {block_bytes:,}",
        unit="bytes",
        text=size_text(blocks * block_bytes),
    )
    at_once, dp_size = min(batch, max(0, blocks - 1) // of_request), config.parallel.attn_dp_size
    yield Derived(
        name="kv_cache.concurrent_requests",
        value=at_once * dp_size,
        formula="min(batch_size_per_dp_rank, (kv_cache.blocks - 1) / blocks_per_request)"
        f" * attn_dp_size = min({batch}, {blocks - 1} / {of_request}) * {dp_size}",
        unit="requests",
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


def _pool(
    config: InferenceConfig, share: RankShare, wanted: int, block_bytes: int
) -> tuple[int, str]:
    """Blocks of a rank's pool, as far as this can be said before the device is asked."""
    kv_cache, memory = config.kv_cache, config.platform.device_memory
    if kv_cache.num_blocks:
        return kv_cache.num_blocks, "kv_cache.num_blocks"
    if not memory:
        return wanted, "blocks_wanted, or less where the device has less memory"
    room = int((memory - share.weight_bytes) * kv_cache.mem_fraction)
    fitting = max(0, room // block_bytes)
    formula = (
        "what is wanted and fits into (platform.device_memory - rank.weight_bytes) * mem_fraction"
        f" = min({wanted}, {room:,} / {block_bytes:,})"
    )
    return min(wanted, fitting), formula


def _longest(config: InferenceConfig, length: int) -> str:
    if length == config.engine.max_model_len:
        return "engine.max_model_len"
    return "tokens of the longest request that a layer keeps on average, windows included"
