"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F
from torch import nn

from inferkit.layers.context import ModelContext


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, *, ctx: ModelContext) -> None:
        super().__init__()
        self.eps = eps
        self.weight = ctx.empty(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class UnitOffsetRMSNorm(RMSNorm):
    """x / sqrt(mean(x^2) + eps) * (1 + weight), computed in float32 (the norms of Gemma)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), scale.shape, scale, self.eps).to(x.dtype)
