"""Replaces automatic values (0 or `auto`) once, before anything is built."""

from dataclasses import replace

from inferkit.config.schema import InferenceConfig, PlatformConfig

AUTO_PLATFORM = "auto"
CPU_PLATFORM = "inferkit.platforms.cpu.CpuPlatform"
AUTO_BATCH_PER_DP_RANK = 32
AUTO_STEP_TOKENS = 2048
"""Enough tokens to keep the matrix products of a step busy, few enough to answer decodes."""


def resolve_automatic(cfg: InferenceConfig, *, context_len: int = 0) -> InferenceConfig:
    """A copy of `cfg` in which automatic values are what they became; `cfg` stays as it is.

    `data.seed` stays null: each request draws its own. `kv_cache.num_blocks` stays 0: the worker
    sizes the pool when the model is loaded. Resolving twice changes nothing.

    Args:
        context_len: longest context of the model, which a role takes for its own. 0 = the model's
            files are not here yet; what depends on it stays 0 until they are.
    """
    data, scheduler = cfg.data, cfg.scheduler
    max_model_len = cfg.engine.max_model_len
    if cfg.role is not None:
        max_model_len = max_model_len or context_len
    else:
        max_model_len = max_model_len or data.input_truncated_len + scheduler.max_new_tokens
    batch_size = scheduler.batch_size or AUTO_BATCH_PER_DP_RANK * cfg.parallel.attn_dp_size
    batch_per_dp_rank = batch_size // cfg.parallel.attn_dp_size
    if scheduler.enable_chunked_prefill:
        # Every decoding request takes one token of a step; half of it is left for prompts.
        step_tokens = max(AUTO_STEP_TOKENS, 2 * batch_per_dp_rank)
    elif cfg.role is not None:
        step_tokens = max_model_len
    else:
        step_tokens = data.input_truncated_len * batch_per_dp_rank
    return replace(
        cfg,
        platform=resolve_platform(cfg.platform),
        engine=replace(cfg.engine, max_model_len=max_model_len),
        scheduler=replace(
            scheduler,
            batch_size=batch_size,
            max_prefill_tokens=scheduler.max_prefill_tokens or step_tokens,
        ),
    )


def resolve_platform(platform: PlatformConfig) -> PlatformConfig:
    """The best device of this machine, found by its device files, in place of `auto`."""
    if platform._target_ != AUTO_PLATFORM:
        return platform
    return replace(platform, _target_=CPU_PLATFORM)
