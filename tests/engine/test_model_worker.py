from typing import Any

import torch
from torch import nn

from inferkit.core.cache_spec import CacheSpec
from inferkit.engine.exe_mode import Eager
from inferkit.engine.model_worker import ModelWorker
from inferkit.engine.profiler import NullProfiler
from inferkit.layers.attention import Attention
from inferkit.layers.context import ModelContext
from inferkit.layers.latent_attention import LatentAttention
from inferkit.loader.dummy_loader import DummyModelLoader
from inferkit.platforms.cpu import CpuPlatform


class TwoLayers(nn.Module):
    """Only caches."""

    def __init__(self, *, ctx: ModelContext) -> None:
        super().__init__()
        self.attention = Attention(
            layer_idx=0, num_kv_heads=3, num_model_kv_heads=5, head_dim=6, ctx=ctx
        )
        self.latents = LatentAttention(layer_idx=1, latent_size=16, rope_size=4, scale=1.0, ctx=ctx)

    def cache_specs(self) -> list[CacheSpec]:
        return [self.attention.cache_spec, self.latents.cache_spec]


def make_worker() -> ModelWorker:
    comm: Any = None  # these layers send nothing
    worker = ModelWorker(
        platform=CpuPlatform(),
        make_model=TwoLayers,
        dtype=torch.bfloat16,
        block_size=4,
        loader=DummyModelLoader(seed=0),
        source=None,
        exe_mode=Eager(),
        profiler=NullProfiler(),
        progress=lambda done, total: None,
        comm=comm,
    )
    worker.model = TwoLayers(ctx=worker.ctx)
    return worker


def test_caches_are_laid_into_one_buffer_from_outside() -> None:
    worker = make_worker()
    specs = worker.cache_specs(64)
    assert [spec.num_model_heads for spec in specs] == [5, 1]
    buffers: list[torch.Tensor] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return buffers[-1]

    worker.init_kvcache(specs, {"full_attention": 10}, allocate)
    (buffer,) = buffers
    assert worker.cache_buffer is buffer
    caches = worker.kv_caches()
    assert [tuple(t.shape) for pair in caches for t in pair] == [
        (10, 4, 3, 6),
        (10, 4, 3, 6),
        (10, 4, 1, 16),
        (10, 4, 1, 4),
    ]
    offsets = [t.data_ptr() - buffer.data_ptr() for pair in caches for t in pair]
    assert offsets == [0, 1440, 4096, 4096 + 1280]
    for tensor in (t for pair in caches for t in pair):
        tensor.fill_(1)
    assert buffer[:2880].any() and not buffer[2880:4096].any()


def test_without_that_each_layer_has_memory_of_its_own() -> None:
    worker = make_worker()
    worker.init_kvcache(worker.cache_specs(64), {"full_attention": 10})
    assert worker.cache_buffer is None
    assert not any(t.any() for pair in worker.kv_caches() for t in pair)
