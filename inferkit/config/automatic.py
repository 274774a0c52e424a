"""Automatic values as origins: what 0 or `auto` became, and by which rule."""

from inferkit.config.leaves import flat
from inferkit.config.origins import AUTOMATIC, Origin, Origins
from inferkit.config.provenance import plain
from inferkit.config.resolve import AUTO_BATCH_PER_DP_RANK, AUTO_STEP_TOKENS
from inferkit.config.schema import InferenceConfig


def with_automatic(
    origins: Origins, composed: InferenceConfig, resolved: InferenceConfig
) -> dict[str, tuple[Origin, ...]]:
    """`origins`, in the schema's order, and what automatic values became after all others."""
    before, after = flat(plain(composed)), flat(plain(resolved))
    found = {}
    for key, value in after.items():
        found[key] = tuple(origins.get(key, ()))
        if value != before.get(key):
            rule = _rule(key, resolved)
            found[key] += (Origin(kind=AUTOMATIC, text=rule, value=value),)
    return found


def _rule(key: str, resolved: InferenceConfig) -> str:
    """The rule of `inferkit.config.resolve` that gave a value, with its numbers."""
    data, scheduler, parallel = resolved.data, resolved.scheduler, resolved.parallel
    batch = resolved.batch_size_per_dp_rank
    if key == "platform._target_":
        return "the best device of this machine"
    if key == "scheduler.batch_size":
        each = AUTO_BATCH_PER_DP_RANK
        return f"{each} for each DP rank: {each} * attn_dp_size = {each} * {parallel.attn_dp_size}"
    if key == "engine.max_model_len":
        if resolved.role is not None:
            return "the context of the model"
        return (
            "data.input_truncated_len + scheduler.max_new_tokens = "
            f"{data.input_truncated_len} + {scheduler.max_new_tokens}"
        )
    if key == "scheduler.max_prefill_tokens":
        if scheduler.enable_chunked_prefill:
            return f"max({AUTO_STEP_TOKENS}, 2 * batch_size_per_dp_rank = 2 * {batch})"
        if resolved.role is not None:
            return f"engine.max_model_len = {resolved.engine.max_model_len}"
        return (
            "data.input_truncated_len * batch_size_per_dp_rank = "
            f"{data.input_truncated_len} * {batch}"
        )
    return "chosen for this run"
