"""The random number of every (seed, sample index, position, token id). Keeps no state.

Two published mixers do the work. SplitMix64's finaliser (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014) absorbs seed, sample index and position into a key of
two 32-bit words, in Python integers. MurmurHash3's 32-bit finaliser (Austin Appleby) mixes the key
with each token id on the device:

    h = fmix32(fmix32(token_id ^ low word) ^ high word),  u = (h + 1/2) / 2**32

The integers stay in int64 and below 2**63, so nothing overflows and every device agrees. For one
key h is a bijection of the token ids. Changing anything here changes the tokens of every seed.

Legend: R = rows, C = candidate tokens of a row.
"""

import math

import torch

_MASK_32 = 2**32 - 1
_MASK_64 = 2**64 - 1
_SPLITMIX_GAMMA = 0x9E3779B97F4A7C15
_SPLITMIX_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# Minus 2**32: the same product modulo 2**32, and below 2**63 in size.
_FMIX_ROUNDS = ((16, 0x85EBCA6B - 2**32), (13, 0xC2B2AE35 - 2**32))
_FMIX_LAST_SHIFT = 16

MAX_GUMBEL = -math.log(-math.log((_MASK_32 + 0.5) / 2**32)) + 1e-9
"""No noise exceeds this (about 22.9); the rest is room for another library's logarithm."""


def row_key(seed: int, sample_index: int, position: int) -> tuple[int, int]:
    """(low, high) 32-bit words of the key of one draw."""
    state = 0
    for value in (seed, sample_index, position):
        state = _mix64(state ^ value)
    return state & _MASK_32, state >> 32


def _mix64(value: int) -> int:
    """SplitMix64's output for the state `value`."""
    value = (value + _SPLITMIX_GAMMA) & _MASK_64
    value = ((value ^ (value >> 30)) * _SPLITMIX_FACTORS[0]) & _MASK_64
    value = ((value ^ (value >> 27)) * _SPLITMIX_FACTORS[1]) & _MASK_64
    return value ^ (value >> 31)


def random_bits(keys_R2: torch.Tensor, token_ids_RC: torch.Tensor) -> torch.Tensor:
    """[R, C] int64 in [0, 2**32): the hash of each row's key and token id (both int64)."""
    bits_RC = torch.bitwise_xor(token_ids_RC, keys_R2[:, :1])
    _fmix32_(bits_RC)
    bits_RC.bitwise_xor_(keys_R2[:, 1:])
    _fmix32_(bits_RC)
    return bits_RC


def _fmix32_(bits: torch.Tensor) -> None:
    """MurmurHash3's finaliser, in place."""
    shifted = torch.empty_like(bits)
    for shift, factor in _FMIX_ROUNDS:
        torch.bitwise_right_shift(bits, shift, out=shifted)
        bits.bitwise_xor_(shifted).mul_(factor).bitwise_and_(_MASK_32)
    torch.bitwise_right_shift(bits, _FMIX_LAST_SHIFT, out=shifted)
    bits.bitwise_xor_(shifted)


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """float64 -log(-log u) of random bits; between -3.2 and `MAX_GUMBEL`."""
    # float64: the largest u are 1 in float32, and their noise would be infinite.
    noise = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return noise.log_().neg_().log_().neg_()
