from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from inferkit.layers.attention import Attention, ContiguousAttention
from inferkit.layers.context import ModelContext
from inferkit.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from inferkit.layers.functional import apply_rotary, expand_rotary, silu_and_mul
from inferkit.layers.linear import Linear, MergedColumnParallelLinear
from inferkit.layers.norm import RMSNorm
from inferkit.platforms.cpu import CpuPlatform
from tests.stored import InMemory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_context(dtype=torch.float32, **platform):
    return ModelContext(platform=CpuPlatform(**platform), dtype=dtype, block_size=16)


def fill(module):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 7, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_weights_give_the_plain_product(dtype, num_tokens, has_bias):
    layer = fill(Linear(96, 80, bias=has_bias, ctx=make_context(dtype)))
    x = torch.randn(num_tokens, 96).to(dtype)
    plain = F.linear(x.float(), layer.weight.float(), layer.bias.float() if has_bias else None)
    layer.pack()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(layer(x).float(), plain, atol=tolerance, rtol=tolerance)


def test_enable_weight_nz_false_keeps_the_plain_weight():
    layer = fill(Linear(96, 80, ctx=make_context(enable_weight_nz=False)))
    weight = layer.weight
    layer.pack()
    assert layer.weight is weight


def test_packing_leaves_no_second_copy():
    layer = fill(Linear(96, 80, ctx=make_context()))
    layer.pack()
    assert dict(layer.named_parameters()) == {}
    assert layer.weight.is_mkldnn


def test_merged_shards_land_in_order():
    sizes = {"q": 6, "k": 2, "v": 2}
    layer = MergedColumnParallelLinear(4, sizes, bias=True, kind="dense", ctx=make_context())
    for parameter in (layer.weight, layer.bias):
        for number, (name, size) in enumerate(layer.shard_sizes.items()):
            shard = torch.full((size, *parameter.shape[1:]), float(number))
            parameter.weight_loader(parameter, InMemory(shard), name)
    expected = torch.tensor([0.0] * 6 + [1.0] * 2 + [2.0] * 2)
    assert torch.equal(layer.bias, expected)
    assert torch.equal(layer.weight, expected[:, None].expand(10, 4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_head_reads_the_embedding_and_gives_float32(dtype):
    ctx = make_context(dtype)
    embedding = VocabParallelEmbedding(50, 32, ctx=ctx)
    head = ParallelLMHead(32, 50, tied=embedding, ctx=ctx)
    fill(embedding)  # after the head was made, as a loader does
    assert dict(head.named_parameters()) == {}
    head.pack()
    x = torch.randn(3, 32).to(dtype)
    logits = head(x, SimpleNamespace(dp_num_sampled=None))
    assert logits.dtype is torch.float32
    expected = x.float() @ embedding.weight.float().T
    torch.testing.assert_close(logits, expected, atol=2e-2, rtol=2e-2)


def test_rms_norm():
    norm = fill(RMSNorm(16, 1e-5, ctx=make_context()))
    x = torch.randn(5, 3, 16)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_silu_and_mul():
    gate_up = torch.randn(3, 8)
    gate, up = gate_up[:, :4], gate_up[:, 4:]
    torch.testing.assert_close(silu_and_mul(gate_up), gate * gate.sigmoid() * up)


def test_apply_rotary_rotates_each_pair_by_its_angle():
    x = torch.randn(3, 2, 8)
    angles = torch.rand(3, 4) * 6
    out = apply_rotary(x, *expand_rotary(angles.cos(), angles.sin(), torch.float32))
    pairs = torch.complex(x[..., :4], x[..., 4:])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), -1))


def test_layers_with_different_windows_have_their_own_block_tables():
    ctx = make_context()
    keys = [
        Attention(layer_idx=0, num_kv_heads=2, head_dim=8, window=w, ctx=ctx).plan_key
        for w in (None, 8, 16)
    ]
    assert len(set(keys)) == 3


def test_contiguous_attention_refuses_a_window():
    with pytest.raises(ValueError, match="sliding window of 8 tokens"):
        ContiguousAttention(layer_idx=3, num_kv_heads=2, head_dim=8, window=8, ctx=make_context())
