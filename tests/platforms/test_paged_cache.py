"""Paged attention against plain attention over each request's own keys."""

import numpy as np
import pytest
import torch

from inferkit.platforms.paged_cache import PagedCache
from tests.fakes import make_spec

HEADS, KV_HEADS, DIM = 6, 2, 8


ROWS = [
    [(0, 5), (0, 5), (0, 2)],  # fresh prompts, two of one length
    [(7, 4), (0, 3), (12, 1), (3, 1), (30, 1)],  # all kinds in one step
    [(9, 1), (1, 1), (25, 1), (0, 1)],  # decodes of different lengths
    [(0, 5), (0, 2), (0, 5)],  # equal lengths that are not adjacent
]
"""(tokens computed before, tokens of the step) of each row."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def plain_attention(q, k, v, window, sinks_N=None):
    """q [n, N, D] are the last queries over all keys k, v [L, Nk, D]; in float32."""
    q, k, v = q.float(), k.float(), v.float()
    num_q, length = len(q), len(k)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q, k) * DIM**-0.5
    queries = torch.arange(length - num_q, length)[:, None]
    keys = torch.arange(length)[None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks_N is not None:
        column = sinks_N.float()[:, None, None].expand(HEADS, num_q, 1)
        scores = torch.cat((scores, column), dim=-1)
    return torch.einsum("nqk,knd->qnd", scores.softmax(-1)[..., :length], v)


def check_attend(rows, block_size, window, sinks_N=None, dtype=torch.float32):
    """A step of `rows` over a cache in random blocks equals plain attention, row by row."""
    generator = torch.Generator().manual_seed(1)
    cache = PagedCache(device=torch.device("cpu"))
    width = -(-40 // block_size)
    num_blocks = len(rows) * width + 1
    buffers = tuple(
        torch.full((num_blocks, block_size, KV_HEADS, DIM), 1e4, dtype=dtype) for _ in range(2)
    )
    permuted = torch.randperm(num_blocks - 1, generator=generator).numpy() + 1
    table = permuted.reshape(len(rows), width).astype(np.int32)
    step, expected, slots = [], [], []
    for row, (computed, num_q) in zip(table, rows, strict=True):
        total = computed + num_q
        q, k, v = (
            torch.randn(length, heads, DIM, generator=generator).to(dtype)
            for length, heads in ((num_q, HEADS), (total, KV_HEADS), (total, KV_HEADS))
        )
        positions = np.arange(total)
        row_slots = row[positions // block_size].astype(np.int64) * block_size
        row_slots = torch.from_numpy(row_slots + positions % block_size)
        cache.write(buffers, (k[:computed], v[:computed]), row_slots[:computed])
        step.append((q, k[computed:], v[computed:]))
        slots.append(row_slots[computed:])
        expected.append(plain_attention(q, k, v, window, sinks_N))
    q, k, v = (torch.cat(parts) for parts in zip(*step, strict=True))
    q_lens = np.array([num_q for _, num_q in rows])
    kv_lens = np.array([computed + num_q for computed, num_q in rows])
    plan = cache.plan(
        dtype=str(dtype).removeprefix("torch."),
        block_size=block_size,
        window=window,
        q_lens=q_lens,
        kv_lens=kv_lens,
        block_table=table,
        slots=torch.cat(slots),
    )
    cache.write(buffers, (k, v), plan.slots)
    out = cache.attend(q, k, v, buffers, plan, DIM**-0.5, sinks_N)
    assert out.dtype is dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.float(), torch.cat(expected), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("rows", ROWS)
def test_attend_equals_plain_attention(rows, block_size, window):
    check_attend(rows, block_size, window)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", ROWS)
def test_attend_with_sinks_equals_plain_attention(rows, window, dtype):
    """Each of the six query heads has a sink of its own, also where heads stand in for queries."""
    sinks_N = torch.tensor([-2.0, 0.0, 3.0, 1.0, -9.0, 6.0]).to(dtype)
    check_attend(rows, 4, window, sinks_N, dtype)


def test_allocate_lays_tensors_into_a_given_buffer():
    spec = make_spec()
    cache = PagedCache(device=torch.device("cpu"))
    buffer = torch.zeros(3 * spec.bytes_per_block + 8, dtype=torch.uint8)
    buffer[-8:] = 255
    k, v = cache.allocate(spec, 3, buffer)
    assert k.shape == v.shape == (3, 4, 1, 8)
    assert not k.any() and not v.any()
    v[2] = 1.0
    assert buffer[-8 - spec.bytes_per_block // 2 : -8].any() and buffer[-8:].eq(255).all()


def test_a_buffer_that_is_too_small_is_refused():
    spec = make_spec()
    with pytest.raises(ValueError, match="layer 0 needs 768 bytes"):
        PagedCache(device=torch.device("cpu")).allocate(spec, 3, torch.zeros(8, dtype=torch.uint8))
