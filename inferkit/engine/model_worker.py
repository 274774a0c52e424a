"""Holds the model of one rank: construct, load, bind the cache, run."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from inferkit.core.cache_spec import CacheKind, CacheSpec
from inferkit.core.errors import ModelLoadError
from inferkit.engine.exe_mode import Eager, Forward
from inferkit.engine.inputs import ModelInputs
from inferkit.engine.profiler import NullProfiler, Profiler
from inferkit.layers.attention import CONTIGUOUS_KEY
from inferkit.layers.context import ModelContext
from inferkit.layers.linear import Linear
from inferkit.layers.moe.block import ExpertParallelMoE
from inferkit.layers.moe.experts import LocalExperts
from inferkit.loader.base_loader import BaseModelLoader
from inferkit.loader.source import ModelSource
from inferkit.parallel.comm_manager import CommManager
from inferkit.platforms.base import Platform

logger = logging.getLogger(__name__)

CACHE_ALIGNMENT = 4096
"""Bytes: the caches of layers in one buffer begin at pages of their own."""


class ModelWorker:
    """Two-phase: the constructor stores, `init` builds the model and loads its weights.

    Args:
        make_model: `model_cls(arch, **custom_params)` waiting for its `ctx`.
        progress: called with (bytes done, bytes in all) while weights load.
    """

    def __init__(
        self,
        *,
        platform: Platform,
        make_model: Callable[..., nn.Module],
        dtype: torch.dtype,
        block_size: int,
        loader: BaseModelLoader,
        source: ModelSource | None,
        exe_mode: Eager,
        profiler: Profiler | NullProfiler,
        progress: Callable[[int, int], None],
        comm: CommManager,
        force_eplb: bool = False,
    ) -> None:
        self.platform = platform
        self.make_model = make_model
        self.ctx = ModelContext(
            platform=platform,
            dtype=dtype,
            block_size=block_size,
            comm=comm,
            force_eplb=force_eplb,
        )
        self.loader = loader
        self.source = source
        self.exe_mode = exe_mode
        self.profiler = profiler
        self.progress = progress
        self.model: Any = None
        self.model_compiled: Forward | None = None
        self.num_weight_bytes = 0
        self.cache_buffer: torch.Tensor | None = None
        """[n] uint8 that all caches lie in, where they were allocated from outside."""

    def init(self) -> None:
        """Build the model on the device, load its weights, bring them into the device's layout."""
        self.model = self.make_model(ctx=self.ctx)
        self.model.eval()
        self.loader.load(self.model, self.source, progress=self.progress)
        self.num_weight_bytes = sum(p.nbytes for p in self.model.parameters())
        for module in self.model.modules():
            if isinstance(module, Linear | LocalExperts):
                module.pack()

    def cache_specs(self, max_model_len: int) -> list[CacheSpec]:
        """Caches of all layers; for a model that declares none, one block per request each."""
        specs = self.model.cache_specs()
        if specs is not None:
            return list(specs)
        return [
            CacheSpec(
                layer_idx=layer_idx,
                kind=CacheKind.FULL,
                manager_key=CONTIGUOUS_KEY,
                num_heads=module.cache_unit[0],
                dims=(module.cache_unit[1], module.cache_unit[1]),
                dtype=self.ctx.dtype_name,
                block_size=max_model_len,
            )
            for layer_idx, module in enumerate(self._modules_with("cache_unit"))
        ]

    def init_kvcache(
        self,
        specs: list[CacheSpec],
        num_blocks: Mapping[str, int],
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """Allocate the cache and bind `k_cache` and `v_cache` of every attention layer.

        `allocate` gives zeroed uint8 memory of so many bytes, asked for once, that all caches are
        laid into: memory that a transfer engine shares with other processes.
        """
        is_contiguous = self.model.cache_specs() is None
        modules = self._modules_with("cache_unit" if is_contiguous else "cache_spec")
        if not modules or len(modules) != len(specs):
            raise ModelLoadError(
                f"{type(self.model).__name__} has {len(modules)} attention layers for "
                f"{len(specs)} cache specs; each layer needs a cache_spec (paged) or a "
                "cache_unit (contiguous)"
            )
        sizes = [num_blocks[spec.manager_key] * spec.bytes_per_block for spec in specs]
        buffers: list[torch.Tensor | None] = [None] * len(specs)
        if allocate is not None:
            self.cache_buffer = allocate(sum(map(_aligned, sizes)))
            buffers = list(self.cache_buffer.split(list(map(_aligned, sizes))))
        for module, spec, buffer in zip(modules, specs, buffers, strict=True):
            module.k_cache, module.v_cache = self.platform.cache.allocate(
                spec, num_blocks[spec.manager_key], buffer
            )

    def kv_caches(self) -> list[tuple[torch.Tensor, ...]]:
        """The cache tensors of each layer, in the order of the cache specs."""
        is_contiguous = self.model.cache_specs() is None
        modules = self._modules_with("cache_unit" if is_contiguous else "cache_spec")
        return [(module.k_cache, module.v_cache) for module in modules]

    def compile_model(self) -> None:
        """Make the forward that decode steps use; called once, after a dummy prefill."""
        self.model_compiled = self.exe_mode.compile(self.model)

    def inference(
        self, model_inputs: ModelInputs, is_prefill: bool, is_mtp: bool = False
    ) -> tuple[torch.Tensor, float]:
        """Run the model once; returns its output and the seconds until the device was done."""
        forward = self.model.forward
        if not is_prefill and self.model_compiled is not None:
            forward = self.model_compiled
        metadata = model_inputs.forward_metadata
        traced = nullcontext() if metadata.is_warm_up else self.profiler.step(is_prefill)
        with traced, torch.inference_mode():
            self.platform.synchronize()
            start = time.perf_counter()
            output = forward(
                model_inputs.input_ids,
                model_inputs.position_ids,
                metadata,
                slot_mapping=metadata.slot_mapping,
                block_table=metadata.block_table,
            )
            self.platform.synchronize()
            return output, time.perf_counter() - start

    def expert_counts(self) -> dict[int, torch.Tensor]:
        """Layer -> what this rank adds to the counts of tokens per expert; {} for a dense model."""
        return {
            next(int(part) for part in name.split(".") if part.isdigit()): module.load.counts
            for name, module in self.model.named_modules()
            if isinstance(module, ExpertParallelMoE)
        }

    def _modules_with(self, attribute: str) -> list[Any]:
        return [module for module in self.model.modules() if hasattr(module, attribute)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // CACHE_ALIGNMENT) * CACHE_ALIGNMENT
