"""What ranks run in equality tests; module functions, so that a pool can call them by name."""

from typing import Any

import torch

from inferkit import OfflineInference, SamplingParams, load_config
from inferkit.core.place import RankPlace
from tests.e2e.equality import record_logits


def generate(
    place: RankPlace, overrides: list[str], prompts: list[list[int]], num_new_tokens: int
) -> dict[str, Any]:
    """Greedy tokens of all prompts, and the logits of those that this DP rank ran."""
    llm = OfflineInference(load_config(overrides), place=place)
    recorder = record_logits(llm)
    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens)
    try:
        results = llm.generate(prompts, params)
    finally:
        llm.parts.comm.close()
    comm, kv_cache = llm.parts.comm, llm.parts.kv_cache
    assert kv_cache.num_used_blocks == 0
    kv_cache.check_integrity()
    assert llm.parts.scheduler.has_work is False
    logits = {
        request_id: torch.stack(rows).numpy()
        for request_id, rows in recorder.logits.items()
        if comm.is_dp_leader
    }
    return {
        "tokens": [result.token_ids for result in results],
        "logits": logits,
        "num_batches": len(recorder.batches),
        "num_collectives": comm.timer.num_calls,
        "is_lock_step": comm.joins_dp_ranks,
        "has_experts": bool(getattr(llm.parts.arch, "num_experts", 0)),
    }
