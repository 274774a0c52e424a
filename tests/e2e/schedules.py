"""What the equality tests of random-weight models share: prompts, schedules, references.

A schedule is a way to divide the work of all prompts into steps; none may change a token.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from inferkit import OfflineInference, SamplingParams, load_config
from tests.e2e.equality import (
    LogitsRecorder,
    Reference,
    assert_same_tokens,
    hf_generate,
    record_logits,
)
from tests.families import VARIANTS

NUM_NEW_TOKENS = 10
PROMPT_LENS = (1, 2, 5, 17, 33, 60, 9, 9)
MAX_MODEL_LEN = 72
LOGITS_ATOL = 1e-4

SCHEDULES = {
    "one_batch": ["kv_cache.block_size=16"],
    "alone": ["scheduler.batch_size=1", "kv_cache.block_size=16"],
    "small_chunks": ["kv_cache.block_size=4", "scheduler.max_prefill_tokens=11"],
    "no_chunks": ["kv_cache.block_size=128", "scheduler.enable_chunked_prefill=false"],
    "waiting_for_blocks": ["kv_cache.block_size=4", "kv_cache.num_blocks=25"],
    "prefix_cache": ["kv_cache.block_size=4", "kv_cache.enable_prefix_cache=true"],
    "padded_decodes": ["kv_cache.block_size=1", "exe_mode.batch_buckets=[2,8]"],
}


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    ids = [[rng.randrange(3, 259) for _ in range(n)] for n in PROMPT_LENS]
    ids[-1] = ids[3][:8] + ids[-1][8:]  # a shared prefix of two blocks of 4
    return ids


def reference_of(folder: Path) -> Reference:
    """What transformers generates of all prompts with the model in `folder`."""
    return hf_generate(folder, prompts(), NUM_NEW_TOKENS)


class References:
    """The folder of each registered variant and what transformers generates with it, made once."""

    def __init__(self, tiny_hf_model: Callable[..., Path]) -> None:
        self.tiny_hf_model = tiny_hf_model
        self.made: dict[str, Reference] = {}

    def __call__(self, variant: str) -> tuple[str, Path, Reference]:
        """(option, folder, reference)."""
        option, config = VARIANTS[variant]
        folder = self.tiny_hf_model(option, **config)
        if variant not in self.made:
            self.made[variant] = reference_of(folder)
        return option, folder, self.made[variant]


def run(
    folder: Path, option: str, schedule: str, *overrides: str
) -> tuple[OfflineInference, LogitsRecorder, list[Any]]:
    """Generate from all prompts; what ran, its logits, and its results."""
    config = load_config(
        [
            f"model={option}",
            f"model.path={folder}",
            "model.dtype=float32",
            "scheduler.batch_size=4",
            f"engine.max_model_len={MAX_MODEL_LEN}",
            "allowed_targets=[tests]",
            "scheduler._target_=tests.components.CheckedScheduler",
            *SCHEDULES[schedule],
            *overrides,
        ]
    )
    llm = OfflineInference(config)
    recorder = record_logits(llm)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
    results = llm.generate(prompts(), params)
    assert llm.parts.kv_cache.num_used_blocks == 0
    llm.parts.kv_cache.check_integrity()
    return llm, recorder, results


def check(
    llm: OfflineInference,
    recorder: LogitsRecorder,
    results: list[Any],
    expected: Reference,
    case: str,
) -> None:
    """Tokens and logits of a run are those of the reference."""
    for request, result, (tokens, gaps, logits) in zip(
        llm.requests, results, expected, strict=True
    ):
        assert_same_tokens(result.token_ids, tokens, gaps, case=f"{case} {len(tokens)}")
        ours = torch.stack(recorder.logits[request.request_id])
        if result.token_ids == tokens:
            torch.testing.assert_close(ours[: len(logits)], logits, atol=LOGITS_ATOL, rtol=0)
