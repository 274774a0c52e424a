"""Seeded random weights, for runs that need a model's shape and not its words."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from inferkit.loader.base_loader import BaseModelLoader, Progress, WeightAssigner, no_progress
from inferkit.loader.slices import complete_index

if TYPE_CHECKING:
    from inferkit.loader.source import ModelSource

CHUNK_ELEMENTS = 1 << 22  # bounds the float32 copy of a tensor that is made in another type
NORM_NOISE = 0.05
BIAS_STD = 0.02


class DummyModelLoader(BaseModelLoader):
    """Normal values by tensor name and seed: equal in every process, order and parallel split.

    Matrices have a standard deviation of 1/sqrt(columns) (0.02 at 2500 columns), so activations
    neither vanish nor grow at any width; norm weights are about 1, biases about 0.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    @torch.no_grad()
    def load(
        self, model: nn.Module, source: "ModelSource | None", *, progress: Progress = no_progress
    ) -> None:
        del source  # the shape is all it could give, and the model has that
        described: Any = model
        expected: dict[str, tuple[int, ...]] = described.expected_tensors()
        dtype = next(model.parameters()).dtype
        total = sum(torch.Size(shape).numel() for shape in expected.values()) * dtype.itemsize
        assigner = WeightAssigner(model)
        done = 0
        progress(0, total)
        for name, shape in expected.items():
            assigner.assign(name, RandomTensor(name, tuple(shape), self.seed, dtype))
            done += torch.Size(shape).numel() * dtype.itemsize
            progress(done, total)
        assigner.check_complete()


@dataclass(frozen=True)
class RandomTensor:
    """The random tensor of a name, made whole when the first part of it is read."""

    name: str
    shape: tuple[int, ...]
    seed: int
    dtype: torch.dtype

    def read(self, *index: slice) -> torch.Tensor:
        return self._whole[complete_index(self.shape, index)]

    @cached_property
    def _whole(self) -> torch.Tensor:
        return make_tensor(self.name, self.shape, seed=self.seed, dtype=self.dtype)


def make_tensor(
    name: str, shape: tuple[int, ...], *, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    """The random tensor of this name; another type gives the same values, rounded."""
    mean, std = 0.0, BIAS_STD
    if len(shape) > 1:
        std = shape[-1] ** -0.5
    elif not name.endswith("bias"):
        mean, std = 1.0, NORM_NOISE
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    tensor = torch.empty(shape, dtype=dtype)
    for chunk in tensor.view(-1).split(CHUNK_ELEMENTS):
        chunk.copy_(torch.randn(len(chunk), generator=generator).mul_(std).add_(mean))
    return tensor
