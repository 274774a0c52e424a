"""Every family at every split equals transformers, in float32 (the equality matrix)."""

import random

import numpy as np
import pytest

from tests.e2e.equality import assert_same_tokens, hf_generate
from tests.parallel.cases import generate

NUM_NEW_TOKENS = 8
PROMPT_LENS = (1, 2, 5, 17, 33, 9, 9)
LOGITS_ATOL = 1e-4


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 259) for _ in range(length)] for length in PROMPT_LENS]


@pytest.fixture(scope="module")
def reference(tiny_hf_model):
    """(folder, what transformers generates) of a family, made once."""
    made = {}

    def get(family, **config):
        key = (family, str(sorted(config.items())))
        if key not in made:
            directory = tiny_hf_model(family, **config)
            made[key] = directory, hf_generate(directory, prompts(), NUM_NEW_TOKENS)
        return made[key]

    return get


def check(pool, family, reference, overrides):
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
    logits = {}
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


@pytest.mark.parametrize("split", ["tp2", "dp2"])
def test_two_ranks(ranks, reference, split):
    check(ranks(2), "llama", reference("llama"), [f"parallel={split}"])
