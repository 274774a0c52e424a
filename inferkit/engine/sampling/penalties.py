"""Changes of logits that come before temperature: penalties and tokens that must not come yet.

Legend: R = rows, V = vocabulary.
"""

from collections.abc import Sequence

import torch

from inferkit.core.batch import BatchRow


def has_penalty(row: BatchRow) -> bool:
    sampling = row.request.sampling
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def apply_penalties_(logits_RV: torch.Tensor, rows: Sequence[BatchRow]) -> None:
    """Repetition over prompt and output, then frequency and presence over the output; in place."""
    params = [row.request.sampling for row in rows]
    flat = logits_RV.view(-1)
    outputs = [row.request.output_token_ids for row in rows]
    rows_N, places_N = _places(
        [row.request.prompt_token_ids + row.request.output_token_ids for row in rows], logits_RV
    )
    # A token that occurs twice is written twice with the same value.
    repetition_N = _per_row([p.repetition_penalty for p in params], logits_RV)[rows_N]
    seen_N = flat[places_N]
    flat[places_N] = torch.where(seen_N > 0, seen_N / repetition_N, seen_N * repetition_N)
    _, places_N = _places(outputs, logits_RV)
    places_N, counts_N = torch.unique(places_N, return_counts=True)
    rows_N = places_N // logits_RV.shape[1]
    frequency_N = _per_row([p.frequency_penalty for p in params], logits_RV)[rows_N]
    presence_N = _per_row([p.presence_penalty for p in params], logits_RV)[rows_N]
    flat[places_N] -= frequency_N * counts_N + presence_N


def suppressed_token_ids(row: BatchRow, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that would end the request before its `min_tokens`; end-of-sequence tokens only
    where they end it."""
    request = row.request
    sampling = request.sampling
    if len(request.output_token_ids) >= sampling.min_tokens:
        return frozenset()
    stop_token_ids = frozenset(sampling.stop_token_ids)
    return stop_token_ids if sampling.ignore_eos else stop_token_ids | eos_token_ids


def suppress_(logits_RV: torch.Tensor, token_ids: Sequence[frozenset[int]]) -> None:
    """Set the logits of each row's token ids to -inf, in place."""
    vocab_size = logits_RV.shape[1]
    pairs = [(i, t) for i, ids in enumerate(token_ids) for t in sorted(ids) if t < vocab_size]
    if pairs:
        index_2N = torch.tensor(pairs, dtype=torch.int64, device=logits_RV.device).T
        logits_RV[index_2N[0], index_2N[1]] = float("-inf")


def _places(
    token_ids: Sequence[list[int]], like_RV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row number and place in the flat logits of every token of every row's list."""
    lengths = torch.tensor([len(ids) for ids in token_ids])
    rows_N = torch.repeat_interleave(torch.arange(len(token_ids)), lengths)
    ids_N = torch.cat([torch.tensor(ids, dtype=torch.int64) for ids in token_ids])
    rows_N, ids_N = rows_N.to(like_RV.device), ids_N.to(like_RV.device)
    return rows_N, rows_N * like_RV.shape[1] + ids_N


def _per_row(values: Sequence[float], like_RV: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like_RV.dtype, device=like_RV.device)
