"""The forced balance against its formula, and what the load of experts counts."""

import pytest
import torch

from inferkit.layers.moe.balance import ExpertLoad, balanced_ids

SHAPES = [(1, 1), (1, 4), (3, 2), (16, 4), (5, 8)]


def ids_of(num_tokens, top_k, *, num_experts, ep_size, ep_rank, is_prefill):
    some_ids = torch.zeros(num_tokens, top_k, dtype=torch.int64)
    return balanced_ids(
        some_ids, num_experts=num_experts, ep_size=ep_size, ep_rank=ep_rank, is_prefill=is_prefill
    )


@pytest.mark.parametrize("num_tokens,top_k", SHAPES)
@pytest.mark.parametrize("ep_size", [1, 2, 8])
def test_ids_are_those_of_the_formula(num_tokens, top_k, ep_size):
    num_experts, num_pairs = 16, num_tokens * top_k
    for rank in range(ep_size):
        prefill, decode = [], []
        for i in range(num_pairs):
            prefill.append((i + rank) % num_experts)
            o = num_pairs * rank + rank + i
            num_local = num_experts // ep_size
            decode.append((o // ep_size) % num_local + (o % ep_size) * num_local)
        for is_prefill, expected in ((True, prefill), (False, decode)):
            ids = ids_of(
                num_tokens,
                top_k,
                num_experts=num_experts,
                ep_size=ep_size,
                ep_rank=rank,
                is_prefill=is_prefill,
            )
            assert ids.tolist() == torch.tensor(expected).view(num_tokens, top_k).tolist()


@pytest.mark.parametrize("num_tokens,top_k", SHAPES)
@pytest.mark.parametrize("ep_size", [1, 2, 8])
@pytest.mark.parametrize("is_prefill", [True, False])
def test_ids_load_experts_evenly_and_differ_within_a_token(num_tokens, top_k, ep_size, is_prefill):
    for rank in range(ep_size):
        ids = ids_of(
            num_tokens,
            top_k,
            num_experts=8,
            ep_size=ep_size,
            ep_rank=rank,
            is_prefill=is_prefill,
        )
        counts = torch.bincount(ids.flatten(), minlength=8)
        assert len(counts) == 8 and counts.max() - counts.min() <= 1
        assert all(len(set(row)) == top_k for row in ids.tolist())


def test_a_rank_without_tokens_has_no_ids():
    ids = ids_of(0, 2, num_experts=8, ep_size=2, ep_rank=1, is_prefill=True)
    assert ids.shape == (0, 2)


def test_load_counts_real_tokens_of_a_rank_that_answers():
    ids = torch.tensor([[0, 3], [3, 1], [2, 2]])
    is_real = torch.tensor([True, True, False])
    load = ExpertLoad(4, answers=True, device=torch.device("cpu"))
    load.add(ids, is_real)
    load.add(ids[:1], is_real[:1])
    load.add(ids[:0], is_real[:0])
    assert load.counts.tolist() == [2, 1, 0, 3]
    copy = ExpertLoad(4, answers=False, device=torch.device("cpu"))
    copy.add(ids, is_real)
    assert not copy.counts.any()
