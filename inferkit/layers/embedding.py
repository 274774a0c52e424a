"""Token embedding and output head, split over the vocabulary.

Legend: T = packed tokens, S = sampled rows, V = vocabulary, H = hidden size.
"""

import torch
import torch.nn.functional as F
from torch import nn

from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.core.parallel_layout import local_size
from inferkit.layers.context import ModelContext
from inferkit.layers.linear import ColumnParallelLinear
from inferkit.layers.token_exchange import TokenExchange
from inferkit.layers.weights import StoredTensor, load_slice


class VocabParallelEmbedding(nn.Module):
    """Rows of weight [V, H] by token id; a rank holds V / embed_tp_size of them."""

    def __init__(self, vocab_size: int, hidden_size: int, *, ctx: ModelContext) -> None:
        super().__init__()
        self.group = ctx.comm.group("embed_tp_group")
        self.exchange = TokenExchange("embed", ctx)
        self.local_size = local_size(vocab_size, self.group.size)
        self.start = self.group.rank * self.local_size
        self.weight = ctx.empty(self.local_size, hidden_size)
        self.weight.weight_loader = self._load  # type: ignore[attr-defined]

    def _load(self, parameter: torch.Tensor, stored: StoredTensor, shard_id: str | None) -> None:
        load_slice(parameter, stored, dim=0, start=self.start)

    def forward(self, input_ids_T: torch.Tensor, metadata: ForwardMetaData) -> torch.Tensor:
        if self.group.size == 1:
            return F.embedding(input_ids_T, self.weight)
        ids_T = self.exchange.gather_tokens(input_ids_T, metadata) - self.start
        is_here_T = (ids_T >= 0) & (ids_T < self.local_size)
        x_TH = F.embedding(ids_T.clamp(0, self.local_size - 1), self.weight)
        x_TH = self.group.all_reduce(x_TH * is_here_T[:, None])
        return self.exchange.own_tokens(x_TH, metadata)


class ParallelLMHead(ColumnParallelLinear):
    """Hidden states of the sampled rows to float32 logits; a rank computes V / lmhead_tp_size.

    Where the head is tied and divided like the embedding it shares the embedding's parameter.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tied: VocabParallelEmbedding | None = None,
        ctx: ModelContext,
    ) -> None:
        super().__init__(hidden_size, vocab_size, kind="lmhead", ctx=ctx)
        self.vocab_size = vocab_size
        self.group = ctx.comm.group("lmhead_tp_group")
        self.exchange = TokenExchange("lmhead", ctx)
        if tied is not None and tied.group.ranks == self.group.ranks:
            # A plain attribute: the parameter belongs to the embedding, which loads it.
            del self.weight
            self.weight = tied.weight.data

    def forward(self, x_SH: torch.Tensor, metadata: ForwardMetaData) -> torch.Tensor:  # type: ignore[override]
        """[S, V] float32, equal on all attention-TP ranks."""
        x_SH = self.exchange.gather(x_SH, metadata.dp_num_sampled)
        logits = self.group.all_gather(super().forward(x_SH), dim=-1)
        logits = self.exchange.own(logits, metadata.dp_num_sampled)
        return logits[:, : self.vocab_size].float()
