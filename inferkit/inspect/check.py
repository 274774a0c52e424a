"""The verb `check`: what a configuration comes to, without running it."""

from inferkit.config.check import Checked
from inferkit.config.faults import show
from inferkit.config.memory import mib
from inferkit.config.model_files import class_name

UNKNOWN = "known once its files are here"


def summary(checked: Checked) -> str:
    """Lines of derived values of a configuration that can run."""
    cfg, files = checked.config, checked.files
    assert cfg is not None, "only a configuration without faults has a summary"
    dtype = cfg.model.dtype.value
    longest = cfg.engine.max_model_len
    per_rank = cfg.batch_size_per_dp_rank
    if files.arch is None:
        weights = per_token = UNKNOWN
    else:
        parameters = int(files.arch.num_parameters)
        weights = f"{mib(files.weight_bytes(dtype))} ({parameters:,} parameters)"
        num_bytes = files.kv_bytes_per_token(dtype)
        per_token = (
            f"{num_bytes:,} bytes per token, {mib(num_bytes * longest * per_rank)} for "
            f"{per_rank} x {longest} tokens"
        )
    chunked = "chunked prefill" if cfg.scheduler.enable_chunked_prefill else "whole prompts"
    rows = {
        "model": f"{cfg.model.name} ({class_name(cfg.model._target_)}, {dtype})",
        "path": show(cfg.model.path),
        "platform": class_name(cfg.platform._target_),
        "ranks": f"{cfg.parallel.world_size}",
        "request length": f"at most {longest} tokens",
        "batch": f"{cfg.scheduler.batch_size} requests, batch_size_per_dp_rank={per_rank}",
        "step": f"{cfg.scheduler.max_prefill_tokens} tokens, {chunked}",
        "weights": weights,
        "KV cache": f"{per_token}, blocks of {cfg.kv_cache.block_size}",
    }
    return "\n".join(f"  {name:<15}{value}" for name, value in rows.items())
