"""Elementwise operators between the layers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from inferkit.core.forward_metadata import ForwardMetaData

Activation = Callable[[torch.Tensor], torch.Tensor]
"""[T, 2I] -> [T, I]: the gate is the first half, what it gates the second."""


def silu_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """[T, 2I] -> [T, I]: silu of the first half times the second (SwiGLU, arXiv 2002.05202)."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """[T, 2I] -> [T, I]: gelu of the first half, in its tanh form, times the second (GeGLU)."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def expand_rotary(
    cos_TH: torch.Tensor, sin_TH: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, D/2] tables -> [T, 1, D] in the form that `apply_rotary` takes, once per step."""
    cos = torch.cat((cos_TH, cos_TH), dim=-1)
    sin = torch.cat((-sin_TH, sin_TH), dim=-1)
    return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


def apply_rotary(x_TND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head (RoPE, arXiv 2104.09864, in the half-split order)."""
    half = x_TND.shape[-1] // 2
    return torch.addcmul(x_TND * cos, torch.roll(x_TND, half, dims=-1), sin)


def sampled_rows(x_TH: torch.Tensor, metadata: ForwardMetaData) -> torch.Tensor:
    """[T, H] -> [S, H]: the rows whose logits this DP rank samples."""
    if metadata.cp_metadata is not None:
        rows_SH: torch.Tensor = metadata.cp_metadata.sampled_rows(x_TH)
        return rows_SH
    return x_TH[metadata.logits_indices]
