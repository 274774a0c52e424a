"""Automatic values as origins: what 0, null or `auto` became, and by which rule."""

from inferkit.config.leaves import flat
from inferkit.config.origins import AUTOMATIC, Origin, Origins
from inferkit.config.provenance import plain
from inferkit.config.resolve import AUTO_BATCH_PER_DP_RANK, AUTO_PLATFORM, AUTO_STEP_TOKENS
from inferkit.config.schema import InferenceConfig

AUTOMATIC_KEYS = (
    "platform._target_",
    "engine.max_model_len",
    "scheduler.batch_size",
    "scheduler.max_prefill_tokens",
    "data.run_seed",
)
"""Keys that become something else before anything is built."""


def with_automatic(origins: Origins, resolved: InferenceConfig) -> dict[str, tuple[Origin, ...]]:
    """`origins` of every leaf of `resolved`, in the schema's order, automatic values last."""
    found = {}
    for key, value in flat(plain(resolved)).items():
        found[key] = tuple(origins.get(key, ()))
        if key in AUTOMATIC_KEYS and found[key] and _is_automatic(found[key][-1], value):
            origin = Origin(kind=AUTOMATIC, text=_rule(key, resolved), value=value)
            found[key] += (origin,)
    return found


def _is_automatic(last: Origin, value: object) -> bool:
    return last.value in (0, None, AUTO_PLATFORM) and last.value != value


def _rule(key: str, resolved: InferenceConfig) -> str:
    """The rule of `inferkit.config.resolve` that gave a value, with its numbers."""
    data, scheduler, parallel = resolved.data, resolved.scheduler, resolved.parallel
    batch = resolved.batch_size_per_dp_rank
    if key == "platform._target_":
        return "the best device of this machine"
    if key == "data.run_seed":
        return "drawn for this run, so that it can be repeated"
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
    assert key == "scheduler.max_prefill_tokens", f"{key} has no rule"
    if scheduler.enable_chunked_prefill:
        return f"max({AUTO_STEP_TOKENS}, 2 * batch_size_per_dp_rank = 2 * {batch})"
    if resolved.role is not None:
        return f"engine.max_model_len = {resolved.engine.max_model_len}"
    return (
        f"data.input_truncated_len * batch_size_per_dp_rank = {data.input_truncated_len} * {batch}"
    )
