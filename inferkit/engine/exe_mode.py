"""Execution modes: how a model's forward is made callable."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Forward = Callable[..., torch.Tensor]


class Eager:
    """Operator by operator: nothing to compile, any shape.

    Args:
        batch_buckets: decode batches are padded to the smallest of these that holds them.
    """

    def __init__(
        self,
        *,
        name: str = "eager",
        batch_buckets: Sequence[int] = (),
        enable_cache_compile: bool = False,
        enable_static_kernel: bool = False,
        enable_dynamic_graph: bool = True,
    ) -> None:
        self.name = name
        self.batch_buckets = tuple(sorted(batch_buckets))

    def compile(self, model: nn.Module) -> Forward:
        """The callable that decode steps use."""
        forward: Any = model.forward
        return forward  # type: ignore[no-any-return]

    def padded_size(self, num_requests: int) -> int:
        """Rows of a decode batch after padding; larger than every bucket means no padding."""
        return next((size for size in self.batch_buckets if size >= num_requests), num_requests)
