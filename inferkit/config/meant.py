"""Words that other programs use, and what they are called here; keys that nobody sets."""

import re
from collections.abc import Mapping

NO_PIPELINE = "there is no pipeline parallelism; layers are split over ranks, such as parallel=tp4"
SIZE_WORDS: Mapping[str, str] = {
    "tp": "tensor_parallel",
    "dp": "data_parallel",
    "ep": "expert_parallel",
    "cp": "context_parallel",
    "pp": "pipeline_parallel",
}
ALIASES: Mapping[str, str] = {
    "max_num_seqs": "scheduler.batch_size",
    "max_running_requests": "scheduler.batch_size",
    "max_batch_size": "scheduler.batch_size",
    "max_num_batched_tokens": "scheduler.max_prefill_tokens",
    "chunked_prefill_size": "scheduler.max_prefill_tokens",
    "gpu_memory_utilization": "kv_cache.mem_fraction",
    "mem_fraction_static": "kv_cache.mem_fraction",
    "page_size": "kv_cache.block_size",
    "max_seq_len": "engine.max_model_len",
    "context_length": "engine.max_model_len",
    "max_tokens": "scheduler.max_new_tokens",
    "model_path": "model.path",
}
"""Flags of other executors -> the key here."""
DERIVED: Mapping[str, str] = {
    "attn_dp_size": "parallel.world_size / parallel.attn_tp_size",
    "moe_ep_size": "parallel.world_size / parallel.moe_tp_size",
    "embed_dp_size": "parallel.world_size / parallel.embed_tp_size",
    "ranks_per_node": "parallel.devices_per_node, or parallel.world_size where that is 0",
    "batch_size_per_dp_rank": "scheduler.batch_size / attn_dp_size",
}
"""Derived values -> their formula."""
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_SUFFIXES = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)b?")


def renamed(key: str, value: str) -> str | None:
    """The override that a word of another program stands for; None = unknown.

    `tensor_parallel_size`, `4` -> `parallel=tp4`.
    """
    last = key.rpartition(".")[2]
    for short, long in SIZE_WORDS.items():
        if short != "pp" and last in (short, f"{short}_size", long, f"{long}_size"):
            return f"parallel={short}{value or 'N'}"
    return f"{ALIASES[last]}={value or 'VALUE'}" if last in ALIASES else None


def is_pipeline(key: str) -> bool:
    last = key.rpartition(".")[2]
    return last in ("pp", "pp_size", "pipeline_parallel", "pipeline_parallel_size")


def derived_formula(key: str) -> str | None:
    """How a value comes about that is derived from others; None = it is none of them."""
    return DERIVED.get(key.rpartition(".")[2])


def as_bytes(text: str) -> int | None:
    """`64GB` -> 64000000000, `1GiB` -> 1073741824; None = no number of bytes."""
    found = BYTES.fullmatch(text.strip().lower())
    if found is None:
        return None
    return int(float(found[1]) * {**SUFFIXES, **BINARY_SUFFIXES}[found[2]])
