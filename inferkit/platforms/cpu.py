"""The CPU: reference platform and the one that every test runs on."""

import os
import resource

import psutil
import torch
import torch.nn.functional as F

from inferkit.core.errors import ConfigError
from inferkit.core.host import available_memory
from inferkit.core.place import RankPlace
from inferkit.platforms.base import Platform

KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
NUM_KERNELS = "64"


class CpuPlatform(Platform):
    """Weights are packed for oneDNN, whose prepacked matrix product reads them about 1.5 times
    as fast as the plain one at small batches."""

    name = "cpu"
    device = torch.device("cpu")
    comm_backend = "gloo"
    num_ranks = 1
    """Ranks that share the memory and the cores of this node."""

    def start(self, place: RankPlace) -> None:
        self.num_ranks = place.local_world_size
        num_threads = max(1, usable_cores() // self.num_ranks)
        torch.set_num_threads(self.num_threads or num_threads)
        # oneDNN keeps a compiled kernel for each number of tokens that it has seen, by default
        # 1024 of them: hundreds of megabytes. It reads these at its first operator.
        for name in KERNEL_CACHES:
            os.environ.setdefault(name, NUM_KERNELS)

    def synchronize(self) -> None:
        """Operators have finished when they return."""

    def free_memory(self) -> int:
        if self.device_memory:
            return self.device_memory
        free_bytes = available_memory()
        if free_bytes is None:
            raise ConfigError(
                "the free memory of this system is unknown; set platform.device_memory"
            )
        return free_bytes // self.num_ranks

    def peak_memory(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        if not self.enable_weight_nz or not _has_packed_linear(weight.dtype):
            return weight
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return packed

    def linear(
        self, x_TK: torch.Tensor, weight: torch.Tensor, bias_N: torch.Tensor | None
    ) -> torch.Tensor:
        if not weight.is_mkldnn:
            return F.linear(x_TK, weight, bias_N)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, weight, bias_N, "none", [], "")
        return out

    def profiler_activities(self) -> list[torch.profiler.ProfilerActivity]:
        return [torch.profiler.ProfilerActivity.CPU]


def _has_packed_linear(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type natively here."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def usable_cores() -> int:
    """Physical cores that this process may use: hyper-threads only compete for the same units."""
    allowed = len(os.sched_getaffinity(0))
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical))
