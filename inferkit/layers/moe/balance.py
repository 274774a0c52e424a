"""Expert load: how evenly tokens fall on experts, and the forced balance of benchmarks."""

import torch

from inferkit.core.forward_metadata import ForwardMetaData


def balanced_ids(
    ids_GK: torch.Tensor, *, num_experts: int, ep_size: int, ep_rank: int, is_prefill: bool
) -> torch.Tensor:
    """Expert ids of the same shape that load every expert equally (reference section 2.1).

    For pair i of this rank: in prefill (i + rank) mod E; in decode, with o = pairs * rank + rank
    + i, expert (o // ep) mod E_local of expert rank o mod ep.
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
    """Counts of (token, expert) pairs that this rank routed, without warm-up steps."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.num_experts = num_experts
        self.counts = torch.zeros(num_experts, dtype=torch.int64, device=device)

    def add(self, ids_GK: torch.Tensor, metadata: ForwardMetaData) -> None:
        if not metadata.is_warm_up:
            self.counts += torch.bincount(ids_GK.flatten(), minlength=self.num_experts)
