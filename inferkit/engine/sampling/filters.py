"""Which tokens may be sampled: min-p, then top-k, then top-p, after temperature.

Tokens are ordered by logit, equal logits by token id, so a kept set is always the beginning of one
order that does not depend on the batch, the device or a sort's stability.

Legend: R = rows, V = vocabulary, C = candidate tokens of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

PREFIX_LEN = 1024
"""Top-p first looks at this many tokens; only rows that keep more are sorted."""
CHUNK_SIZE = 2**17
"""Tokens that are worked on at once: their 64-bit integers stay in a CPU's cache."""


@dataclass(frozen=True, kw_only=True)
class RowParams:
    """Per-row parameters on the device; `max_R` is the row's highest logit."""

    max_R: torch.Tensor
    temperature_R: torch.Tensor
    """float64, > 0."""
    min_p_R: torch.Tensor
    """float64; 0 = off."""
    top_p_R: torch.Tensor
    """float64; inf = off."""
    top_k_R: torch.Tensor
    """int64; the vocabulary size = off."""
    keys_R2: torch.Tensor
    """int64 words of the key of each row's noise."""

    def select(self, index: torch.Tensor | slice) -> "RowParams":
        return RowParams(**{name: tensor[index] for name, tensor in vars(self).items()})

    def min_p_floor(self) -> torch.Tensor:
        """[R, 1] float32: the lowest logit that min-p keeps; -inf where it is off."""
        return self.floor(self.min_p_R.log())

    def floor(self, gap_R: torch.Tensor) -> torch.Tensor:
        """[R, 1] float32: the logit that lies `gap_R` (<= 0) from the highest after temperature.

        Rounded down, so that a comparison with it never loses a token.
        """
        floor_R = (self.max_R + self.temperature_R * gap_R).to(torch.float32)
        below = torch.full_like(floor_R, float("-inf"))
        return torch.nextafter(floor_R, below).unsqueeze(1)

    def scaled(self, values_RC: torch.Tensor) -> torch.Tensor:
        """float64 (logit - highest logit) / temperature."""
        shifted = values_RC.to(torch.float64).sub_(self.max_R.unsqueeze(1))
        return shifted.div_(self.temperature_R.unsqueeze(1))


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Tokens of some rows that may be sampled."""

    index_R: torch.Tensor
    """Which rows these are."""
    token_ids_RC: torch.Tensor
    values_RC: torch.Tensor
    """Their logits; -inf = not a candidate."""

    def select(self, index: torch.Tensor) -> "Candidates":
        return Candidates(**{name: tensor[index] for name, tensor in vars(self).items()})


def highest(logits_RV: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, num] values and token ids of the highest logits, equal ones by token id."""
    rows_per_chunk = max(1, CHUNK_SIZE // logits_RV.shape[1])
    chunks = [_highest_ids(chunk, num) for chunk in logits_RV.split(rows_per_chunk)]
    token_ids_RC = torch.cat(chunks)
    return logits_RV.gather(1, token_ids_RC), token_ids_RC


def _highest_ids(logits_RV: torch.Tensor, num: int) -> torch.Tensor:
    vocab_size = logits_RV.shape[1]
    # The bits of a float, as an integer, order like the float; those of negative ones backwards.
    order_RV = logits_RV.add(0.0).view(torch.int32)  # adding 0 turns -0 into 0
    order_RV.bitwise_xor_((order_RV >> 31).bitwise_and_(2**31 - 1))
    backward_ids_V = torch.arange(vocab_size - 1, -1, -1, device=logits_RV.device)
    keys_RV = order_RV.to(torch.int64).mul_(2**32).add_(backward_ids_V)
    if num < vocab_size:
        keys_RC = torch.topk(keys_RV, num, dim=-1).values
    else:
        keys_RC = torch.sort(keys_RV, dim=-1, descending=True).values
    return (vocab_size - 1) - keys_RC.bitwise_and_(2**32 - 1)


def keep_top(
    logits_SV: torch.Tensor, params: RowParams, index_R: torch.Tensor
) -> Iterator[Candidates]:
    """Candidates of rows with top-k or top-p, in groups that together hold each of them once."""
    vocab_size = logits_SV.shape[1]
    top_k_R = params.top_k_R[index_R]
    limited_R, open_R = index_R[top_k_R < vocab_size], index_R[top_k_R == vocab_size]
    if len(limited_R):
        yield _keep_in_prefix(logits_SV, params, limited_R, int(params.top_k_R[limited_R].max()))
    if len(open_R) and vocab_size > PREFIX_LEN:
        group = _keep_in_prefix(logits_SV, params, open_R, PREFIX_LEN)
        # A row that keeps its whole prefix may keep more.
        is_whole_R = group.values_RC[:, -1] > float("-inf")
        yield group.select(~is_whole_R)
        open_R = open_R[is_whole_R]
    if len(open_R):
        yield _keep_in_prefix(logits_SV, params, open_R, vocab_size)


def _keep_in_prefix(
    logits_SV: torch.Tensor, params: RowParams, index_R: torch.Tensor, width: int
) -> Candidates:
    """What min-p, top-k and top-p keep of the `width` highest logits of some rows."""
    logits_RV, params = logits_SV[index_R], params.select(index_R)
    floor_R1 = params.min_p_floor()
    values_RC, token_ids_RC = highest(logits_RV, width)
    keep_RC = values_RC >= floor_R1
    keep_RC &= torch.arange(width, device=logits_RV.device) < params.top_k_R.unsqueeze(1)
    weights_RC = params.scaled(values_RC).exp_().masked_fill_(~keep_RC, 0.0)
    sums_RC = weights_RC.cumsum(-1)
    total_R = sums_RC[:, -1]
    if int(params.top_k_R.max()) > width:  # top-p is a share of all tokens, not of the prefix
        weights_RV = params.scaled(logits_RV).exp_().masked_fill_(logits_RV < floor_R1, 0.0)
        total_R = weights_RV.sum(-1)
    # A token stays while those before it have not reached top-p; so the first always does.
    keep_RC &= (sums_RC - weights_RC) < (params.top_p_R * total_R).unsqueeze(1)
    return Candidates(
        index_R=index_R,
        token_ids_RC=token_ids_RC,
        values_RC=values_RC.masked_fill_(~keep_RC, float("-inf")),
    )
