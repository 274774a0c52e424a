"""Which tokens min-p, top-k and top-p keep, to the token."""

from typing import Any

import pytest
import torch

from inferkit.core.batch import BatchRow
from inferkit.engine.sampler import Sampler
from inferkit.engine.sampling.filters import PREFIX_LEN, highest
from tests.engine.rows import make_row

VECTOR = [0.03, 0.09, 0.24, 0.64]


def sample(logits_SV: torch.Tensor, rows: list[BatchRow]) -> list[int]:
    return Sampler().sample(logits_SV, rows).token_ids


def keep_set(probabilities: list[float], **sampling: Any) -> set[int]:
    """All tokens that 400 draws from these probabilities yield."""
    logits = torch.tensor([probabilities]).log()
    rows = [make_row(seed=seed, **sampling) for seed in range(400)]
    return set(sample(logits.expand(400, -1), rows))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_p": 0.9}, {1, 2, 3}),
        ({"top_p": 0.65}, {2, 3}),
        ({"top_p": 0.6}, {3}),
        ({"top_p": 1e-9}, {3}),
        ({"top_k": 2}, {2, 3}),
        ({"top_k": 1}, {3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 100}, {0, 1, 2, 3}),
        ({"min_p": 0.3}, {2, 3}),
        ({"min_p": 0.12}, {1, 2, 3}),
        ({"min_p": 1.0}, {3}),
        # top-p is a share of what top-k left: 0.64 of 0.88 is 0.727.
        ({"top_k": 2, "top_p": 0.72}, {3}),
        ({"top_k": 2, "top_p": 0.73}, {2, 3}),
        # and of what min-p left
        ({"min_p": 0.3, "top_p": 0.72}, {3}),
        ({"min_p": 0.3, "top_k": 3}, {2, 3}),
    ],
)
def test_filters_keep_exactly(sampling: dict[str, Any], kept: set[int]) -> None:
    assert keep_set(VECTOR, **sampling) == kept


def test_filters_see_probabilities_after_temperature() -> None:
    # Squared and normalised: 0.0018, 0.0169, 0.1202, 0.8611
    assert keep_set(VECTOR, temperature=0.5, top_p=0.86) == {3}
    assert keep_set(VECTOR, temperature=0.5, top_p=0.87) == {2, 3}
    assert keep_set(VECTOR, temperature=0.5, min_p=0.15) == {3}
    assert keep_set(VECTOR, temperature=0.5, min_p=0.13) == {2, 3}


def test_equal_tokens_at_the_edge_are_kept_by_id() -> None:
    assert keep_set([0.2] * 5, top_k=3) == {0, 1, 2}
    assert keep_set([0.25] * 4, top_p=0.5) == {0, 1}


def test_top_p_beyond_the_prefix_keeps_what_a_sort_keeps() -> None:
    vocab_size = 3 * PREFIX_LEN
    logits = torch.zeros(2, vocab_size)
    logits[1, 0] = 50.0
    rows = [make_row(seed=seed, top_p=0.5) for seed in range(2)]
    drawn = set()
    for seed in range(200):
        rows[0] = make_row(seed=seed, top_p=0.5)
        tokens = sample(logits, rows)
        drawn.add(tokens[0])
        assert tokens[1] == 0
    assert PREFIX_LEN < max(drawn) < vocab_size // 2


@pytest.mark.parametrize("num", [1, 7, 40])
def test_highest_orders_equal_values_by_token_id(num: int) -> None:
    values = torch.tensor([[0.0, -0.0, 1.5, -2.0, 1.5, float("-inf"), -1e-40, 3e38] * 5])
    found, token_ids = highest(values, num)
    expected = sorted(range(40), key=lambda i: (-float(values[0, i]), i))[:num]
    assert token_ids.tolist() == [expected]
    assert found.tolist() == [values[0, expected].tolist()]
