"""Attention with sinks against a softmax that has the sink as one more column."""

import pytest
import torch

from inferkit.platforms import sinks
from inferkit.platforms.sinks import attend_plain, attend_with_sinks

HEADS, KV_HEADS, DIM, SCALE = 6, 2, 16, 0.4
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def column_of_sinks(q, k, v, sinks_N, bias):
    """In float64: the definition."""
    q, k, v = q.double(), *(x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * SCALE + bias.double()
    column = sinks_N.double()[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v


def inputs(dtype, num_queries=5, num_keys=9):
    generator = torch.Generator().manual_seed(0)
    # Heads vary fastest, as in a packed batch.
    q, k, v = (
        torch.randn(3, length, heads, DIM, generator=generator).to(dtype).transpose(1, 2)
        for length, heads in ((num_queries, HEADS), (num_keys, KV_HEADS), (num_keys, KV_HEADS))
    )
    return q, k, v, 3 * torch.randn(HEADS, generator=generator).to(dtype)


def causal_bias(num_queries, num_keys, dtype):
    hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
    return torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill(hidden, float("-inf"))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("is_plain", [False, True])
def test_sinks_join_the_denominator(monkeypatch, dtype, is_plain):
    if is_plain:
        monkeypatch.setattr(sinks, "_attend_on_cpu", attend_plain)
    q, k, v, sinks_N = inputs(dtype)
    bias = causal_bias(5, 9, dtype)
    out = attend_with_sinks(q, k, v, sinks_N[:, None], bias=bias, scale=SCALE)
    assert out.dtype is dtype
    expected = column_of_sinks(q, k, v, sinks_N, bias)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("is_plain", [False, True])
def test_causal_without_a_mask(monkeypatch, is_plain):
    if is_plain:
        monkeypatch.setattr(sinks, "_attend_on_cpu", attend_plain)
    q, k, v, sinks_N = inputs(torch.float32, 7, 7)
    out = attend_with_sinks(q, k, v, sinks_N[:, None], bias=None, is_causal=True, scale=SCALE)
    expected = column_of_sinks(q, k, v, sinks_N, causal_bias(7, 7, torch.float32))
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0)


def test_extreme_sinks_take_all_or_nothing():
    q, k, v, _ = inputs(torch.float32)
    bias = causal_bias(5, 9, torch.float32)
    low, high = torch.full((2, HEADS, 1), 1e4) * torch.tensor([-1.0, 1.0])[:, None, None]
    nothing_taken = attend_with_sinks(q, k, v, low, bias=bias, scale=SCALE)
    torch.testing.assert_close(nothing_taken, attend_plain_output(q, k, v, bias))
    assert not attend_with_sinks(q, k, v, high, bias=bias, scale=SCALE).any()


def attend_plain_output(q, k, v, bias):
    return attend_plain(q, k, v, bias=bias, is_causal=False, scale=SCALE)[0]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_operator_of_torch_returns_natural_logarithms_in_float32(dtype):
    """It is private to torch: a release that changes it must not go unseen."""
    q, k, v, _ = inputs(dtype)
    bias = causal_bias(5, 9, dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=SCALE
    )
    expected, expected_lse = attend_plain(q, k, v, bias=bias, is_causal=False, scale=SCALE)
    assert out.dtype is dtype and lse.dtype is torch.float32
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=0)
