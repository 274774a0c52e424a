"""Token embedding."""

import torch
import torch.nn.functional as F
from torch import nn

from inferkit.layers.context import ModelContext


class Embedding(nn.Module):
    """Rows of weight [V, H] by token id."""

    def __init__(self, vocab_size: int, hidden_size: int, *, ctx: ModelContext) -> None:
        super().__init__()
        self.weight = ctx.empty(vocab_size, hidden_size)

    def forward(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids_T, self.weight)
