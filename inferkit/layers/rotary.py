"""Rotary position embeddings: angles of each position, as cos and sin tables.

RoPE (arXiv 2104.09864) turns pair i of a head of size D by position * theta**(-2i/D). The
variants stretch a model beyond the context that it was trained on by lowering these frequencies:

- linear: all of them by one factor.
- llama3 (Llama 3.1 model card): long waves by the factor, short waves not, a ramp between.
- yarn (arXiv 2309.00071): the same with a ramp over pairs, and a larger cos and sin.
- dynamic: theta grows with the length of the sequence, from the trained context on.
- longrope (arXiv 2402.13753): a factor for each pair; one set up to the trained context, one after.

For the last two a frequency depends on a length. It must not depend on what else is in the batch,
on chunks, on a preemption or on a prefix hit, so by default the length of a token is its own
position + 1. That equals what transformers does for every prompt within the trained context,
also when the output grows beyond it. For a longer prompt transformers takes the prompt's length
for all its tokens; a caller that passes `prompt_len_T` gets this too, but then must not share
cached prefixes between prompts of different lengths beyond that context.

Legend: T = packed tokens, D = head dim.
"""

import math
from typing import Protocol, Self

import torch
from torch import nn

from inferkit.layers.rope_config import RopeScaling


class RotaryArch(Protocol):
    """The part of a model's shape that decides its rotary embedding."""

    @property
    def head_dim(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> RopeScaling | None: ...
    @property
    def max_position_embeddings(self) -> int: ...


class RotaryEmbedding(nn.Module):
    """Positions to (cos, sin), each [T, D/2] float32, computed in float32 in every model dtype."""

    def __init__(
        self,
        *,
        head_dim: int,
        rope_theta: float = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        max_position_embeddings: int,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self.max_position_embeddings = max_position_embeddings
        self.rope_type = rope_scaling.rope_type if rope_scaling is not None else "default"
        self.attention_factor = 1.0
        inv_freq = theta_powers(rope_theta, head_dim).reciprocal()
        if rope_scaling is not None:
            if self.rope_type == "linear":
                inv_freq = inv_freq / rope_scaling.factor
            elif self.rope_type == "llama3":
                inv_freq = llama3_inv_freq(inv_freq, rope_scaling)
            elif self.rope_type == "yarn":
                inv_freq = yarn_inv_freq(rope_theta, head_dim, rope_scaling)
                self.attention_factor = yarn_attention_factor(rope_scaling)
            elif self.rope_type == "longrope":
                powers = theta_powers(rope_theta, head_dim)
                inv_freq = 1.0 / (torch.tensor(rope_scaling.short_factor) * powers)
                long_inv_freq = 1.0 / (torch.tensor(rope_scaling.long_factor) * powers)
                self.register_buffer("long_inv_freq", long_inv_freq, persistent=False)
                self.attention_factor = longrope_attention_factor(rope_scaling)
        self.inv_freq: torch.Tensor
        self.long_inv_freq: torch.Tensor
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @classmethod
    def from_arch(cls, arch: RotaryArch) -> Self:
        return cls(
            head_dim=arch.head_dim,
            rope_theta=arch.rope_theta,
            rope_scaling=arch.rope_scaling,
            max_position_embeddings=arch.max_position_embeddings,
        )

    def forward(
        self, position_ids_T: torch.Tensor, prompt_len_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [T, D/2] float32, of int64 positions.

        `prompt_len_T` is the length of each token's prompt; it changes nothing but the dynamic
        and longrope types (see the module's docstring).
        """
        frequencies = self.inv_freq
        if self.rope_type in ("dynamic", "longrope"):
            length_T = position_ids_T + 1
            if prompt_len_T is not None:
                length_T = torch.maximum(length_T, prompt_len_T)
            frequencies = self._frequencies_of_length(length_T)
        angles = position_ids_T.float()[:, None] * frequencies
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def _frequencies_of_length(self, length_T: torch.Tensor) -> torch.Tensor:
        """[T, D/2] frequencies of tokens in sequences of these lengths."""
        scaling = self.rope_scaling
        assert scaling is not None, f"rope type {self.rope_type} has scaling"
        if self.rope_type == "longrope":
            is_long = length_T[:, None] > scaling.original_max_position_embeddings
            return torch.where(is_long, self.long_inv_freq, self.inv_freq)
        trained = self.max_position_embeddings
        stretch = scaling.factor * length_T.clamp(min=trained) / trained - (scaling.factor - 1)
        theta_T = self.rope_theta * stretch ** (self.head_dim / (self.head_dim - 2))
        exponents = pair_exponents(self.head_dim).to(length_T.device)
        return 1.0 / (theta_T[:, None] ** exponents)


def pair_exponents(head_dim: int) -> torch.Tensor:
    """[D/2] 2i / D of every pair i."""
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def theta_powers(rope_theta: float, head_dim: int) -> torch.Tensor:
    """[D/2] theta ** (2i/D): positions per radian of every pair."""
    powers: torch.Tensor = rope_theta ** pair_exponents(head_dim)
    return powers


def llama3_inv_freq(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divide by the factor what turns less than low_freq_factor times in the trained context.

    What turns more than high_freq_factor times stays; between, the share that stays rises
    linearly with the number of turns.
    """
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1.0 - kept) * inv_freq / scaling.factor + kept * inv_freq


def yarn_inv_freq(rope_theta: float, head_dim: int, scaling: RopeScaling) -> torch.Tensor:
    """NTK-by-parts of YaRN, section 3.2: interpolate slow pairs, keep fast ones, ramp between."""

    def pair_of_turns(turns: float) -> float:
        """The (fractional) pair that turns this often in the trained context."""
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope_theta))

    first, last = pair_of_turns(scaling.beta_fast), pair_of_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1.0 - ((pairs - first) / width).clamp(0.0, 1.0)
    powers = theta_powers(rope_theta, head_dim)
    return (1.0 / (scaling.factor * powers)) * (1.0 - kept) + (1.0 / powers) * kept


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """YaRN, section 3.4: the attention's temperature as a factor of cos and sin."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1.0 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def longrope_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1.0:
        return 1.0
    trained = math.log(scaling.original_max_position_embeddings)
    return math.sqrt(1.0 + math.log(scaling.factor) / trained)
