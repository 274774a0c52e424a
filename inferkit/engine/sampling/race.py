"""Draws one token per row: argmax of logit / temperature + Gumbel noise over the candidates.

The noise is bounded, so a token further below the leader than the bound reaches cannot win and
its noise is never computed; the result is that of the full computation.

Legend: R = rows, V = vocabulary, C = candidate tokens of a row.
"""

import torch

from inferkit.engine.sampling.filters import CHUNK_SIZE, Candidates, RowParams
from inferkit.engine.sampling.noise import MAX_GUMBEL, gumbel, random_bits

MANY = 8
"""Where more than 1/8 of the tokens could win, a look at their random bits is worth its cost."""
SLACK = 1.001
"""Room for float32 rounding in `_could_win`, which is below 1e-4."""


def race(candidates: Candidates, params: RowParams) -> torch.Tensor:
    """[R] token ids: the best score of each row, equal ones by token id."""
    ids_RC, values_RC = candidates.token_ids_RC, candidates.values_RC
    winners = []
    rows_per_chunk = max(1, CHUNK_SIZE // ids_RC.shape[1])
    for start in range(0, len(ids_RC), rows_per_chunk):
        rows = slice(start, start + rows_per_chunk)
        chunk = params.select(candidates.index_R[rows])
        noise_RC = gumbel(random_bits(chunk.keys_R2, ids_RC[rows]))
        scores_RC = chunk.scaled(values_RC[rows]).add_(noise_RC)
        is_best_RC = scores_RC == scores_RC.amax(-1, keepdim=True)
        no_token = torch.iinfo(torch.int64).max
        winners.append(ids_RC[rows].masked_fill(~is_best_RC, no_token).amin(-1))
    return torch.cat(winners) if winners else candidates.index_R


def keep_open(
    logits_SV: torch.Tensor, leaders_S: torch.Tensor, params: RowParams, index_R: torch.Tensor
) -> Candidates:
    """Candidates of rows without top-k and top-p: what min-p keeps and what can win at all."""
    params = params.select(index_R)
    logits_RV, leaders_R1 = logits_SV[index_R], leaders_S[index_R].unsqueeze(1)
    leader_score_R = gumbel(random_bits(params.keys_R2, leaders_R1)).squeeze(1)
    floor_R1 = torch.maximum(params.min_p_floor(), params.floor(leader_score_R - MAX_GUMBEL))
    keep_RV = logits_RV >= floor_R1
    if int(keep_RV.count_nonzero()) * MANY > logits_RV.numel():
        rows_per_chunk = max(1, CHUNK_SIZE // logits_RV.shape[1])
        for start in range(0, len(index_R), rows_per_chunk):
            rows = slice(start, start + rows_per_chunk)
            keep_RV[rows] &= _could_win(logits_RV[rows], params.select(rows), leader_score_R[rows])
    return _picked(logits_RV, keep_RV, index_R)


def _could_win(
    logits_RV: torch.Tensor, params: RowParams, leader_score_R: torch.Tensor
) -> torch.Tensor:
    """Tokens that may beat the leader's score; without logarithms, so some that do not, too.

    With z = (logit - highest) / temperature: z - log(-log u) >= score needs
    -log u <= exp(z - score), and 1 - u <= -log u.
    """
    token_ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    bits_RV = random_bits(params.keys_R2, token_ids_V.unsqueeze(0))
    # 2**32 * (1 - u); subtracted as integers, since float32 would lose the small ones.
    rest_RV = bits_RV.neg_().add_(2**32).to(torch.float32).sub_(0.5)
    highest_R1 = params.max_R.to(torch.float32).unsqueeze(1)
    temperature_R1 = params.temperature_R.to(torch.float32).clamp_min_(1e-30).unsqueeze(1)
    score_R1 = leader_score_R.to(torch.float32).unsqueeze(1)
    limit_RV = logits_RV.sub(highest_R1).div_(temperature_R1).sub_(score_R1).exp_()
    return rest_RV <= limit_RV.mul_(SLACK * 2.0**32)


def _picked(logits_RV: torch.Tensor, keep_RV: torch.Tensor, index_R: torch.Tensor) -> Candidates:
    """The tokens of a mask, moved to the beginning of their rows."""
    rows_N, ids_N = keep_RV.nonzero(as_tuple=True)
    num_R = rows_N.bincount(minlength=len(index_R))
    first_R = num_R.cumsum(0) - num_R
    places_N = torch.arange(len(rows_N), device=logits_RV.device) - first_R[rows_N]
    shape = (len(index_R), int(num_R.max()))
    token_ids_RC = torch.zeros(shape, dtype=torch.int64, device=logits_RV.device)
    values_RC = torch.full(shape, float("-inf"), device=logits_RV.device)
    token_ids_RC[rows_N, places_N] = ids_N
    values_RC[rows_N, places_N] = logits_RV[rows_N, ids_N]
    return Candidates(index_R=index_R, token_ids_RC=token_ids_RC, values_RC=values_RC)
