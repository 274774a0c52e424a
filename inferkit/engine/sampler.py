"""Chooses the next token of every row. Knows nothing of models, schedulers or text.

Greedy rows cost one pass over the logits; each further feature costs only the rows that ask for
it. A row's token depends on its own logits and request only, never on the rest of the batch.

Legend: S = rows that are sampled, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inferkit.core.batch import BatchRow
from inferkit.core.errors import InferkitError
from inferkit.core.request import TokenLogprobs
from inferkit.engine.sampling.filters import RowParams, keep_top
from inferkit.engine.sampling.logprobs import token_logprobs
from inferkit.engine.sampling.noise import row_key
from inferkit.engine.sampling.penalties import (
    apply_penalties_,
    has_penalty,
    suppress_,
    suppressed_token_ids,
)
from inferkit.engine.sampling.race import keep_open, race

BLOCK_SIZE = 128
"""Logits whose maximum is taken first: CPUs compute maxima much faster than their places."""


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """One entry per row, in their order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Order of operations: suppressed tokens, penalties, temperature, min-p, top-k, top-p, draw.

    Args:
        eos_token_ids: not sampled before `min_tokens`, unless the request ignores them.
    """

    def __init__(self, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self.eos_token_ids = eos_token_ids

    def sample(self, logits_SV: torch.Tensor, rows: Sequence[BatchRow]) -> SamplerOutput:
        """Sample the token at position `num_tokens` of each row's request.

        Args:
            logits_SV: float32 on any device; not changed.
            rows: the rows of the batch that sample, one per row of logits.

        Raises:
            InferkitError: logits with NaN or without a finite maximum; names the requests.
        """
        if logits_SV.dtype != torch.float32 or len(logits_SV) != len(rows):
            raise ValueError(
                f"logits are {logits_SV.dtype} {list(logits_SV.shape)}; "
                f"{len(rows)} rows need float32 [{len(rows)}, vocabulary]"
            )
        if not rows:
            return SamplerOutput(token_ids=[], logprobs=[])
        changed_SV = self._change_logits(logits_SV, rows)
        max_S, leaders_S = first_max(changed_SV)
        if changed_SV is not logits_SV:  # a change can hide a NaN
            max_S = torch.where(logits_SV.amax(-1).isfinite(), max_S, float("nan"))
        check_finite(max_S, rows)
        tokens_S = leaders_S
        random_rows = [i for i, row in enumerate(rows) if not row.request.sampling.is_greedy]
        if random_rows:
            index = torch.tensor(random_rows, device=logits_SV.device)
            if len(random_rows) < len(rows):
                changed_SV, max_S, leaders_S = changed_SV[index], max_S[index], leaders_S[index]
            params = row_params([rows[i] for i in random_rows], max_S, changed_SV.shape[1])
            tokens_S = tokens_S.index_copy(0, index, draw(changed_SV, leaders_S, params))
        token_ids: list[int] = tokens_S.tolist()
        return SamplerOutput(token_ids=token_ids, logprobs=logprobs(logits_SV, rows, token_ids))

    def _change_logits(self, logits_SV: torch.Tensor, rows: Sequence[BatchRow]) -> torch.Tensor:
        """Logits with penalties and suppressed tokens; the same tensor where nothing changes."""
        penalised = [i for i, row in enumerate(rows) if has_penalty(row)]
        suppressed = [suppressed_token_ids(row, self.eos_token_ids) for row in rows]
        if not penalised and not any(suppressed):
            return logits_SV
        changed_SV = logits_SV.clone()
        if penalised:
            index = torch.tensor(penalised, device=logits_SV.device)
            penalised_RV = changed_SV[index]
            apply_penalties_(penalised_RV, [rows[i] for i in penalised])
            changed_SV.index_copy_(0, index, penalised_RV)
        suppress_(changed_SV, suppressed)
        return changed_SV


def first_max(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[S] highest logits and the lowest token ids that have them; NaN where a row has one."""
    num_rows, vocab_size = logits_SV.shape
    num_blocks = vocab_size // BLOCK_SIZE
    if num_blocks < 2:
        return logits_SV.max(-1)
    blocks_SBK = logits_SV[:, : num_blocks * BLOCK_SIZE].unflatten(1, (num_blocks, BLOCK_SIZE))
    max_S, block_S = blocks_SBK.amax(-1).max(-1)
    rows_S = torch.arange(num_rows, device=logits_SV.device)
    token_S = block_S * BLOCK_SIZE + blocks_SBK[rows_S, block_S].argmax(-1)
    if num_blocks * BLOCK_SIZE == vocab_size:
        return max_S, token_S
    tail_max_S, tail_S = logits_SV[:, num_blocks * BLOCK_SIZE :].max(-1)
    is_tail_S = (tail_max_S > max_S) | tail_max_S.isnan()
    token_S = torch.where(is_tail_S, tail_S + num_blocks * BLOCK_SIZE, token_S)
    return torch.where(is_tail_S, tail_max_S, max_S), token_S


def check_finite(max_S: torch.Tensor, rows: Sequence[BatchRow]) -> None:
    """Raise for rows whose highest logit is not a finite number, which a NaN makes of any row."""
    is_finite = max_S.isfinite().tolist()
    if all(is_finite):
        return
    ids = [row.request_id for row, good in zip(rows, is_finite, strict=True) if not good]
    raise InferkitError(
        f"logits of request(s) {ids} hold NaN or have no finite maximum; the weights are broken "
        "or model.dtype is too narrow (float16 overflows at 65504: try bfloat16 or float32)"
    )


def row_params(rows: Sequence[BatchRow], max_S: torch.Tensor, vocab_size: int) -> RowParams:
    """Sampling parameters of rows that are drawn, on the device of the logits."""
    requests = [row.request for row in rows]
    params = [request.sampling for request in requests]
    real_values = [
        [p.temperature, p.min_p, p.top_p if p.top_p < 1.0 else float("inf")] for p in params
    ]
    int_values = [
        [
            min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size,
            *row_key(request.seed, request.sample_index, request.num_tokens),
        ]
        for p, request in zip(params, requests, strict=True)
    ]
    real_S3 = torch.tensor(real_values, dtype=torch.float64, device=max_S.device)
    int_S3 = torch.tensor(int_values, dtype=torch.int64, device=max_S.device)
    return RowParams(
        max_R=max_S.to(torch.float64),
        temperature_R=real_S3[:, 0],
        min_p_R=real_S3[:, 1],
        top_p_R=real_S3[:, 2],
        top_k_R=int_S3[:, 0],
        keys_R2=int_S3[:, 1:],
    )


def draw(logits_SV: torch.Tensor, leaders_S: torch.Tensor, params: RowParams) -> torch.Tensor:
    """[S] token ids of rows that are all drawn."""
    is_open_S = params.top_p_R.isinf() & (params.top_k_R == logits_SV.shape[1])
    tokens_S = leaders_S.clone()
    open_rows, top_rows = is_open_S.nonzero().squeeze(1), (~is_open_S).nonzero().squeeze(1)
    groups = [keep_open(logits_SV, leaders_S, params, open_rows)] if len(open_rows) else []
    if len(top_rows):
        groups += keep_top(logits_SV, params, top_rows)
    for candidates in groups:
        tokens_S[candidates.index_R] = race(candidates, params)
    return tokens_S


def logprobs(
    logits_SV: torch.Tensor, rows: Sequence[BatchRow], token_ids: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the rows that ask for them."""
    wanted = {
        i: n for i, row in enumerate(rows) if (n := row.request.sampling.logprobs) is not None
    }
    if not wanted:
        return [None] * len(rows)
    if len(wanted) < len(rows):
        logits_SV = logits_SV[torch.tensor(list(wanted), device=logits_SV.device)]
    found = token_logprobs(logits_SV, [token_ids[i] for i in wanted], list(wanted.values()))
    by_row = dict(zip(wanted, found, strict=True))
    return [by_row.get(i) for i in range(len(rows))]
