"""What the equality tests of all families share: the prompts, and one cell of the matrix."""

import random
from typing import Any

import numpy as np

from tests.e2e.equality import assert_same_tokens, hf_generate
from tests.parallel.cases import generate
from tests.ranks import RankPool

NUM_NEW_TOKENS = 8
PROMPT_LENS = (1, 2, 5, 17, 33, 9, 9)
LOGITS_ATOL = 1e-4


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 259) for _ in range(length)] for length in PROMPT_LENS]


class References:
    """(folder, what transformers generates) of each model, made once.

    Use it through a fixture of module scope: `References(tiny_hf_model)`.
    """

    def __init__(self, tiny_hf_model: Any) -> None:
        self.tiny_hf_model = tiny_hf_model
        self.made: dict[tuple[str, str], tuple[Any, Any]] = {}

    def __call__(self, family: str, **config: Any) -> tuple[Any, Any]:
        key = (family, str(sorted(config.items())))
        if key not in self.made:
            directory = self.tiny_hf_model(family, **config)
            self.made[key] = directory, hf_generate(directory, prompts(), NUM_NEW_TOKENS)
        return self.made[key]


def check(
    pool: RankPool, family: str, reference: tuple[Any, Any], overrides: list[str]
) -> list[dict[str, Any]]:
    """Generate on all ranks of `pool` with `model=<family>` and compare; what each rank returned.

    Args:
        reference: of `References`.
    """
    directory, expected = reference
    outputs = pool.run(
        generate,
        [
            f"model={family}",
            f"model.path={directory}",
            "model.dtype=float32",
            "scheduler.batch_size=4",
            "engine.max_model_len=72",
            "kv_cache.block_size=4",
            "scheduler.max_prefill_tokens=11",
            *overrides,
        ],
        prompts(),
        NUM_NEW_TOKENS,
    )
    logits: dict[int, Any] = {}
    for output in outputs:
        assert output["tokens"] == outputs[0]["tokens"], "ranks returned different results"
        logits |= output["logits"]
    for idx, (tokens, gaps, expected_logits) in enumerate(expected):
        ours = outputs[0]["tokens"][idx]
        assert_same_tokens(ours, tokens, gaps, case=f"{family} {overrides} {PROMPT_LENS[idx]}")
        if ours == tokens:
            np.testing.assert_allclose(
                logits[idx][: len(tokens)], expected_logits.numpy(), atol=LOGITS_ATOL, rtol=0
            )
    return outputs
