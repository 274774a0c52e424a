"""One cell of the equality matrix: a model at one split."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e import schedules
from tests.e2e.equality import Reference, assert_same_tokens
from tests.parallel.cases import generate
from tests.parallel.splits import SPLITS

NUM_NEW_TOKENS = 8
CHOSEN = (0, 1, 2, 3, 4, 6, 7)
"""All prompts but the longest one, which would take as long as the others together."""


def prompts() -> list[list[int]]:
    ids = schedules.prompts()
    return [ids[idx] for idx in CHOSEN]


def shortened(reference: Reference) -> Reference:
    """What a reference of all prompts says about these, and fewer tokens."""
    return [tuple(part[:NUM_NEW_TOKENS] for part in reference[idx]) for idx in CHOSEN]  # type: ignore[misc]


def check(
    ranks: Any, split: str, option: str, folder: Path, reference: Reference
) -> list[dict[str, Any]]:
    """Generate at `split` with `model=<option>` and compare; what each rank returned.

    Args:
        ranks: the fixture, which has a pool for each number of ranks.
        reference: of `schedules.References` or `schedules.reference_of`.
    """
    world_size, overrides = SPLITS[split]
    outputs: list[dict[str, Any]] = ranks(world_size).run(
        generate,
        [
            f"model={option}",
            f"model.path={folder}",
            "model.dtype=float32",
            "scheduler.batch_size=4",
            f"engine.max_model_len={schedules.MAX_MODEL_LEN}",
            *schedules.SCHEDULES["small_chunks"],
            *overrides,
        ],
        prompts(),
        NUM_NEW_TOKENS,
    )
    logits: dict[int, Any] = {}
    for output in outputs:
        assert output["tokens"] == outputs[0]["tokens"], "ranks returned different results"
        logits |= output["logits"]
    for idx, (tokens, gaps, expected_logits) in enumerate(shortened(reference)):
        ours = outputs[0]["tokens"][idx]
        assert_same_tokens(ours, tokens, gaps, case=f"{option} {split} prompt {idx}")
        if ours == tokens:
            np.testing.assert_allclose(
                logits[idx][: len(tokens)],
                expected_logits.numpy(),
                atol=schedules.LOGITS_ATOL,
                rtol=0,
            )
    return outputs
