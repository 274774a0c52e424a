"""How tokens reach the ranks of their experts and come back, over the expert-parallel groups.

Exact: every (token, expert) pair travels once, in all-to-all calls whose counts are exchanged
first; the host waits for the counts. For steps with prompts, where tokens are many.
Fixed: the tokens of all ranks go to all ranks, padded to the longest, and partial sums come back;
shapes depend on nothing but the number of tokens. For decode steps, where tokens are few.

Legend: G = tokens of this rank, K = experts per token, P = pairs = G * K, H = hidden size,
R = ranks of the group, E = experts per rank, M = received rows.
"""

import torch

from inferkit.layers.moe.experts import LocalExperts
from inferkit.parallel.communicator import Communicator, pad_rows


def run_exact(
    x_GH: torch.Tensor,
    weights_GK: torch.Tensor,
    ids_GK: torch.Tensor,
    experts: LocalExperts,
    group: Communicator,
) -> torch.Tensor:
    """[G, H] weighted sum over each token's experts, partial over moe_tp_group."""
    order_P = ids_GK.flatten().argsort(stable=True)
    token_P = order_P // ids_GK.shape[1]
    num_experts = group.size * experts.num_local
    sent_RE = torch.bincount(ids_GK.flatten(), minlength=num_experts).view(group.size, -1)
    received_RE = group.all_to_all(sent_RE, [1] * group.size, [1] * group.size)
    sent, received = sent_RE.sum(1).tolist(), received_RE.sum(1).tolist()
    rows_MH = group.all_to_all(x_GH[token_P], sent, received)
    # Received rows come by rank, then expert; the experts want them by expert, then rank.
    expert_M = torch.arange(experts.num_local, device=x_GH.device).repeat(group.size)
    by_expert_M = expert_M.repeat_interleave(received_RE.flatten()).argsort(stable=True)
    out_MH = torch.empty_like(rows_MH)
    out_MH[by_expert_M] = experts(rows_MH[by_expert_M], received_RE.sum(0).tolist())
    back_PH = group.all_to_all(out_MH, received, sent)
    weights_P = weights_GK.flatten()[order_P].to(x_GH.dtype)
    return torch.zeros_like(x_GH).index_add_(0, token_P, back_PH * weights_P[:, None])


def run_fixed(
    x_GH: torch.Tensor,
    weights_GK: torch.Tensor,
    ids_GK: torch.Tensor,
    experts: LocalExperts,
    group: Communicator,
    max_tokens: int,
) -> torch.Tensor:
    """The same as `run_exact`, with every rank's tokens padded to `max_tokens`."""
    num_tokens = len(x_GH)
    x_GH = group.all_gather(pad_rows(x_GH, max_tokens))
    # A padding row has weight zero and its expert is nobody's.
    weights_GK = group.all_gather(pad_rows(weights_GK, max_tokens))
    ids_GK = group.all_gather(pad_rows(ids_GK + 1, max_tokens)) - 1
    out_GH = run_local(x_GH, weights_GK, ids_GK, experts)
    return group.reduce_scatter(out_GH)[:num_tokens]


def run_local(
    x_GH: torch.Tensor, weights_GK: torch.Tensor, ids_GK: torch.Tensor, experts: LocalExperts
) -> torch.Tensor:
    """[G, H] weighted sum over those experts of each token that live on this rank."""
    local_P = ids_GK.flatten() - experts.first
    is_here_P = (local_P >= 0) & (local_P < experts.num_local)
    pairs_M = is_here_P.nonzero().flatten()
    pairs_M = pairs_M[local_P[pairs_M].argsort(stable=True)]
    counts = torch.bincount(local_P[pairs_M], minlength=experts.num_local).tolist()
    token_M = pairs_M // ids_GK.shape[1]
    out_MH = experts(x_GH[token_M], counts)
    weights_M = weights_GK.flatten()[pairs_M].to(x_GH.dtype)
    return torch.zeros_like(x_GH).index_add_(0, token_M, out_MH * weights_M[:, None])
