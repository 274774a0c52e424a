"""Penalties and suppressed tokens, number by number."""

import torch

from inferkit.engine.sampling.penalties import apply_penalties_, suppress_, suppressed_token_ids
from tests.engine.rows import make_row


def test_penalties_have_the_semantics_of_vllm() -> None:
    logits = torch.tensor([[2.0, -2.0, 3.0, 1.0, 0.5]])
    row = make_row(
        prompt=[0, 0, 1],
        output=[2, 2, 2, 3],
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
    )
    apply_penalties_(logits, [row])
    # Prompt tokens: repetition only. Output tokens: 0.25 each time and 0.5 once more.
    torch.testing.assert_close(
        logits, torch.tensor([[1.0, -4.0, 1.5 - 0.75 - 0.5, 0.5 - 0.25 - 0.5, 0.5]])
    )


def test_penalties_of_rows_without_output() -> None:
    logits = torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    rows = [make_row(prompt=[1], frequency_penalty=1.0), make_row(prompt=[0], presence_penalty=1.0)]
    apply_penalties_(logits, rows)
    assert logits.tolist() == [[1.0, -1.0], [1.0, -1.0]]


def test_each_row_has_its_own_penalties() -> None:
    logits = torch.ones(2, 3)
    rows = [
        make_row(prompt=[0], output=[1], repetition_penalty=2.0),
        make_row(prompt=[0], output=[2, 2], frequency_penalty=0.25),
    ]
    apply_penalties_(logits, rows)
    assert logits.tolist() == [[0.5, 0.5, 1.0], [1.0, 1.0, 0.5]]


def test_suppressed_token_ids_follow_min_tokens_and_ignore_eos() -> None:
    eos = frozenset({2})
    assert suppressed_token_ids(make_row(), eos) == frozenset()
    row = make_row(min_tokens=1, stop_token_ids=(5,))
    assert suppressed_token_ids(row, eos) == {2, 5}
    row = make_row(min_tokens=1, stop_token_ids=(5,), ignore_eos=True)
    assert suppressed_token_ids(row, eos) == {5}
    row = make_row(min_tokens=1, stop_token_ids=(5,), output=[0])
    assert suppressed_token_ids(row, eos) == frozenset()


def test_suppress_sets_minus_infinity_and_skips_ids_outside_the_vocabulary() -> None:
    logits = torch.zeros(2, 3)
    suppress_(logits, [frozenset({0, 7}), frozenset()])
    assert logits.tolist() == [[float("-inf"), 0.0, 0.0], [0.0, 0.0, 0.0]]
