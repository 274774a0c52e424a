"""Log-probabilities under the model's own distribution, before any change of the logits.

Legend: R = rows that ask, V = vocabulary.
"""

from collections.abc import Sequence

import torch

from inferkit.core.request import TokenLogprobs
from inferkit.engine.sampling.filters import highest


def token_logprobs(
    logits_RV: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """The chosen token, its rank and the `num_top` most likely tokens of each row.

    Tokens as likely as the chosen one share its rank; among the top ones the lower id is first.
    """
    chosen_R1 = torch.tensor(token_ids, dtype=torch.int64, device=logits_RV.device).unsqueeze(1)
    chosen_logits_R1 = logits_RV.gather(1, chosen_R1)
    total_R1 = logits_RV.logsumexp(-1, keepdim=True)
    chosen = (chosen_logits_R1 - total_R1).squeeze(1).tolist()
    ranks = ((logits_RV > chosen_logits_R1).sum(-1) + 1).tolist()
    width = min(max(num_top), logits_RV.shape[1])
    tops: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    if width:
        values_RC, ids_RC = highest(logits_RV, width)
        values = (values_RC - total_R1).tolist()
        tops = [list(zip(*pair, strict=True)) for pair in zip(ids_RC.tolist(), values, strict=True)]
    return [
        TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=tuple(top[:num]))
        for token_id, logprob, rank, top, num in zip(
            token_ids, chosen, ranks, tops, num_top, strict=True
        )
    ]
