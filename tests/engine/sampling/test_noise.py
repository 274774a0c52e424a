"""The hash behind every draw: published vectors, exact integers, an even distribution."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from inferkit.core.sampling_params import MAX_SEED
from inferkit.engine.sampling.noise import (
    MAX_GUMBEL,
    _fmix32_,
    _mix64,
    gumbel,
    random_bits,
    row_key,
)


def test_hash_equals_published_vectors_and_is_pinned() -> None:
    # SplitMix64 seeded with 0 begins with e220a8397b1dcdaf; murmur3's fmix32(1) is 514e28b7.
    low, high = row_key(0, 0, 0)
    assert (low, high) != row_key(0, 0, 1)
    assert _mix64(0) == 0xE220A8397B1DCDAF
    words = torch.tensor([0, 1])
    _fmix32_(words)
    assert words.tolist() == [0, 0x514E28B7]
    # A change of these changes the tokens of every seed.
    assert row_key(MAX_SEED, 3, 2**31 - 1) == (3723220133, 3804044426)
    key = torch.tensor([row_key(42, 0, 7)])
    assert random_bits(key, torch.tensor([[0, 1, 49_151]])).tolist() == [
        [793768111, 233273900, 1179325833]
    ]


@given(
    key=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    token_ids=st.lists(st.integers(0, 2**20), min_size=1, max_size=20),
)
def test_hash_equals_integer_arithmetic_without_limits(
    key: tuple[int, int], token_ids: list[int]
) -> None:
    def fmix32(h: int) -> int:
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) % 2**32
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) % 2**32
        return h ^ (h >> 16)

    expected = [fmix32(fmix32(t ^ key[0]) ^ key[1]) for t in token_ids]
    assert random_bits(torch.tensor([key]), torch.tensor([token_ids])).tolist() == [expected]


def test_noise_is_finite_and_bounded_at_both_ends() -> None:
    lowest, highest_noise = gumbel(torch.tensor([0, 2**32 - 1])).tolist()
    assert -3.2 < lowest < -3.1
    assert 22.8 < highest_noise <= MAX_GUMBEL


def test_noise_is_flat_over_a_large_vocabulary() -> None:
    keys = torch.tensor([row_key(seed, 0, 5) for seed in range(20)])
    u = random_bits(keys, torch.arange(49_152).unsqueeze(0)).double() / 2**32
    counts = (u * 64).long().flatten().bincount(minlength=64).double()
    expected = u.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 103.4  # 99.9 %, 63 degrees
