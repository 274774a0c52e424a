"""Latent attention against plain attention over expanded keys and values, and its projections."""

import numpy as np
import pytest
import torch

from inferkit.core.parallel_layout import HeadLayout
from inferkit.layers.context import ModelContext
from inferkit.layers.latent_attention import HeadParallelLinear, LatentAttention, LatentExpansion
from inferkit.platforms.cpu import CpuPlatform
from inferkit.platforms.paged_cache import PagedCache
from inferkit.platforms.paged_latent import is_absorbing_cheaper
from tests.stored import InMemory

HEADS, LATENT, NOPE, ROPE, VALUE = 3, 10, 6, 4, 5
SCALE = 0.37
ROWS = [
    [(0, 5), (0, 5), (0, 2)],  # fresh prompts, two of one length
    [(7, 4), (0, 3), (12, 1), (3, 1), (30, 1)],  # all kinds in one step
    [(9, 1), (1, 1), (25, 1), (0, 1)],  # decodes of different lengths
    [(30, 2), (2, 30)],  # a few tokens after a long prefix, and many after a short one
]
"""(tokens computed before, tokens of the step) of each row."""


def make_context(dtype=torch.float32):
    return ModelContext(platform=CpuPlatform(), dtype=dtype, block_size=4)


def plain_attention(q, latent, rope, weight):
    """q [n, N, Q] are the last queries over all latents [L, C] and rotated parts [L, P]."""
    q, latent, rope, weight = (x.float() for x in (q, latent, rope, weight))
    kv = torch.einsum("lc,noc->lno", latent, weight)
    value_size = weight.shape[1] - (q.shape[-1] - rope.shape[-1])
    k = torch.cat(
        (kv[..., :-value_size], rope[:, None].expand(-1, len(weight), -1)),
        dim=-1,
    )
    scores = torch.einsum("qnd,knd->nqk", q, k) * SCALE
    queries = torch.arange(len(k) - len(q), len(k))[:, None]
    scores = scores.masked_fill(torch.arange(len(k))[None] > queries, float("-inf"))
    return torch.einsum("nqk,knd->qnd", scores.softmax(-1), kv[..., -value_size:])


@pytest.mark.parametrize("value_size", [VALUE, NOPE + ROPE + 3])
@pytest.mark.parametrize("latent_size", [LATENT, 2, 64])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_equals_plain_attention(rows, block_size, latent_size, value_size, dtype):
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    paged = PagedCache(device=torch.device("cpu"))
    width = -(-40 // block_size)
    num_blocks = len(rows) * width + 1
    cache = tuple(
        torch.full((num_blocks, block_size, 1, size), 1e4, dtype=dtype)
        for size in (latent_size, ROPE)
    )
    weight = random(HEADS, NOPE + value_size, latent_size) * 0.3
    permuted = torch.randperm(num_blocks - 1, generator=generator).numpy() + 1
    table = permuted.reshape(len(rows), width).astype(np.int32)
    step, expected, slots = [], [], []
    for row, (computed, num_q) in zip(table, rows, strict=True):
        total = computed + num_q
        q = random(num_q, HEADS, NOPE + ROPE)
        latent, rope = random(total, 1, latent_size), random(total, 1, ROPE)
        positions = np.arange(total)
        row_slots = row[positions // block_size].astype(np.int64) * block_size
        row_slots = torch.from_numpy(row_slots + positions % block_size)
        paged.write(cache, (latent[:computed], rope[:computed]), row_slots[:computed])
        step.append((q, latent[computed:], rope[computed:]))
        slots.append(row_slots[computed:])
        expected.append(plain_attention(q, latent[:, 0], rope[:, 0], weight))
    q, latent, rope = (torch.cat(parts) for parts in zip(*step, strict=True))
    plan = paged.plan(
        dtype=str(dtype).removeprefix("torch."),
        block_size=block_size,
        window=None,
        q_lens=np.array([num_q for _, num_q in rows]),
        kv_lens=np.array([computed + num_q for computed, num_q in rows]),
        block_table=table,
        slots=torch.cat(slots),
    )
    paged.write(cache, (latent, rope), plan.slots)
    weights = (weight[:, :NOPE], weight[:, NOPE:])
    out = paged.attend_latent(q, latent, rope, weights, cache, plan, SCALE)
    assert out.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(out.float(), torch.cat(expected), atol=tolerance, rtol=tolerance)


def test_both_forms_occur_in_rows_with_context():
    sizes = {"latent_size": LATENT, "nope_size": NOPE, "value_size": VALUE}
    assert is_absorbing_cheaper(2, 32, **sizes)
    assert not is_absorbing_cheaper(30, 32, **sizes)


def test_the_cheaper_form_at_the_sizes_of_the_published_model():
    """Absorbing pays up to about 170 tokens after a long prefix, and never for a whole prompt."""
    sizes = {"latent_size": 512, "nope_size": 128, "value_size": 128}
    assert is_absorbing_cheaper(4, 1000, **sizes)
    assert is_absorbing_cheaper(160, 100_000, **sizes)
    assert not is_absorbing_cheaper(180, 100_000, **sizes)
    assert not is_absorbing_cheaper(160, 200, **sizes)
    assert not is_absorbing_cheaper(1000, 1000, **sizes)


def test_a_token_stores_one_latent_and_one_rotated_part():
    layer = LatentAttention(
        layer_idx=2, latent_size=512, rope_size=64, scale=1.0, ctx=make_context(torch.bfloat16)
    )
    spec = layer.cache_spec
    assert (spec.layer_idx, spec.num_heads, spec.dims) == (2, 1, (512, 64))
    assert spec.bytes_per_token == 2 * 576


def test_padded_heads_are_zero_and_the_others_in_their_place():
    heads = HeadLayout(num_heads=4, num_kv_heads=4, tp_size=3).heads(tp_rank=1)
    assert heads == [2, 3]
    stored = torch.arange(4.0).repeat_interleave(5)[:, None].expand(-1, 2) + 1
    for rank, expected in ((1, [3.0, 4.0]), (2, [0.0, 0.0])):
        held = HeadLayout(num_heads=4, num_kv_heads=4, tp_size=3).heads(tp_rank=rank)
        layer = HeadParallelLinear(2, held, 5, ctx=make_context())
        layer.weight.weight_loader(layer.weight, InMemory(stored), None)
        assert layer.weight.view(2, 5, 2).unique(dim=1)[:, 0, 0].tolist() == expected


def test_interleaved_pairs_are_held_as_two_halves():
    layer = HeadParallelLinear(1, [1, 0], 6, interleaved=4, bias=True, ctx=make_context())
    stored = torch.arange(12.0)
    layer.weight.weight_loader(layer.weight, InMemory(stored[:, None]), None)
    layer.bias.weight_loader(layer.bias, InMemory(stored), None)
    expected = [6, 7, 8, 10, 9, 11, 0, 1, 2, 4, 3, 5]
    assert layer.weight[:, 0].tolist() == layer.bias.tolist() == expected


def test_the_expansion_is_kept_in_two_parts():
    layer = LatentExpansion(LATENT, [0, 1, None], NOPE, VALUE, ctx=make_context())
    stored = torch.randn(2 * (NOPE + VALUE), LATENT)
    layer.weight.weight_loader(layer.weight, InMemory(stored), None)
    plain = layer.weights
    layer.pack()
    assert dict(layer.named_parameters()) == {}
    of_head = torch.cat((stored.view(2, -1, LATENT), torch.zeros(1, NOPE + VALUE, LATENT)))
    for weights in (plain, layer.weights):
        assert torch.equal(weights[0], of_head[:, :NOPE])
        assert torch.equal(weights[1], of_head[:, NOPE:])
    assert all(weight.is_contiguous() for weight in layer.weights)
