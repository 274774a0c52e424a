"""Expert load: how evenly tokens fall on experts, and the forced balance of benchmarks."""

import torch


def balanced_ids(
    ids_GK: torch.Tensor, *, num_experts: int, ep_size: int, ep_rank: int, is_prefill: bool
) -> torch.Tensor:
    """Expert ids of the same shape that load all experts equally, or nearly so.

    For pair i of this rank: in prefill (i + rank) mod E; in decode, with o = pairs * rank + rank
    + i, expert (o // ep) mod E_local of expert rank o mod ep (reference section 2.1). A rank's
    ids load experts equally where E divides its pairs, else some have one pair more. The experts
    of one token differ, as top-k <= E.
    """
    num_pairs = ids_GK.numel()
    pairs = torch.arange(num_pairs, device=ids_GK.device)
    if is_prefill:
        ids = (pairs + ep_rank) % num_experts
    else:
        num_local = num_experts // ep_size
        offset = num_pairs * ep_rank + ep_rank + pairs
        ids = offset // ep_size % num_local + offset % ep_size * num_local
    return ids.view_as(ids_GK)


class ExpertLoad:
    """Counts of the (token, expert) pairs that a rank answers for, since the start.

    Warm-up, padding and dummy batches are left out.

    Args:
        answers: whether this rank's counts are to be summed with those of others; of the ranks
            that bring the same tokens, one does.
    """

    def __init__(self, num_experts: int, *, answers: bool, device: torch.device) -> None:
        self.num_experts = num_experts
        self.answers = answers
        self.counts = torch.zeros(num_experts, dtype=torch.int64, device=device)

    def add(self, ids_TK: torch.Tensor, is_real_T: torch.Tensor) -> None:
        """Count the experts of those tokens that are real."""
        if self.answers:
            is_real_P = is_real_T.long().repeat_interleave(ids_TK.shape[1])
            self.counts.index_add_(0, ids_TK.flatten(), is_real_P)
