"""How tokens reach the ranks of their experts and come back, over the expert-parallel groups.

Exact: every (token, expert) pair travels once, in all-to-all calls whose counts are exchanged
first; the host waits for the counts. For steps with prompts, where tokens are many.
Fixed: the tokens of all ranks go to all ranks, padded to the longest, and partial sums come back;
what is sent depends on nothing but the number of tokens. For decode steps, where tokens are few.

Legend: G = tokens of this rank, K = experts per token, P = pairs = G * K, H = hidden size,
R = ranks of the group, E = experts per rank, M = rows that this rank's experts compute.
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
    pairs_P = ids_GK.flatten().argsort(stable=True)
    num_experts = group.size * experts.num_local
    sent_RE = torch.bincount(ids_GK.flatten(), minlength=num_experts).view(group.size, -1)
    received_RE = group.all_to_all(sent_RE, [1] * group.size, [1] * group.size)
    sent, received = sent_RE.sum(1).tolist(), received_RE.sum(1).tolist()
    rows_MH = group.all_to_all(x_GH[pairs_P // ids_GK.shape[1]], sent, received)
    # Received rows come by rank, then expert; the experts want them by expert, then rank.
    expert_M = torch.arange(experts.num_local, device=x_GH.device).repeat(group.size)
    by_expert_M = expert_M.repeat_interleave(received_RE.flatten()).argsort(stable=True)
    out_MH = torch.empty_like(rows_MH)
    out_MH[by_expert_M] = experts(rows_MH[by_expert_M], received_RE.sum(0).tolist())
    return combine(group.all_to_all(out_MH, received, sent), pairs_P, weights_GK)


def run_fixed(
    x_GH: torch.Tensor,
    weights_GK: torch.Tensor,
    ids_GK: torch.Tensor,
    experts: LocalExperts,
    group: Communicator,
    max_tokens: int,
) -> torch.Tensor:
    """The same as `run_exact`, with every rank's tokens padded to `max_tokens`."""
    num_tokens, top_k = ids_GK.shape
    # Weights and ids travel together: float32 holds every id exactly. A padding row's ids are -1.
    choice_G2K = torch.cat((weights_GK, (ids_GK + 1).float()), dim=1)
    choice_G2K = group.all_gather(pad_rows(choice_G2K, max_tokens))
    x_GH = group.all_gather(pad_rows(x_GH, max_tokens))
    weights_GK, ids_GK = choice_G2K[:, :top_k], choice_G2K[:, top_k:].long() - 1
    return group.reduce_scatter(run_local(x_GH, weights_GK, ids_GK, experts))[:num_tokens]


def run_local(
    x_GH: torch.Tensor, weights_GK: torch.Tensor, ids_GK: torch.Tensor, experts: LocalExperts
) -> torch.Tensor:
    """[G, H] weighted sum over those experts of each token that live on this rank."""
    num_local = experts.num_local
    expert_P = ids_GK.flatten() - experts.first
    expert_P = torch.where((expert_P >= 0) & (expert_P < num_local), expert_P, num_local)
    counts = torch.bincount(expert_P, minlength=num_local + 1)[:num_local].tolist()
    pairs_M = expert_P.argsort(stable=True)[: sum(counts)]
    return combine(experts(x_GH[pairs_M // ids_GK.shape[1]], counts), pairs_M, weights_GK)


def combine(rows_MH: torch.Tensor, pairs_M: torch.Tensor, weights_GK: torch.Tensor) -> torch.Tensor:
    """[G, H]: each token's sum of weight times row; pairs without a row add nothing.

    The sum runs in the order of the token's experts, whatever the order of the rows.
    """
    hidden_size = rows_MH.shape[1]
    rows_PH = rows_MH.new_zeros(weights_GK.numel(), hidden_size)
    rows_PH[pairs_M] = rows_MH
    weights_G1K = weights_GK.to(rows_MH.dtype)[:, None]
    return torch.bmm(weights_G1K, rows_PH.view(*weights_GK.shape, hidden_size))[:, 0]
