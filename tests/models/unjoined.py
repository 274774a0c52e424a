"""Models of single ranks, in a process that is joined with none: they are built, not run."""

from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from inferkit import load_config
from inferkit.core.parallel_layout import ParallelLayout, contiguous
from inferkit.layers.context import ModelContext
from inferkit.platforms.cpu import CpuPlatform
from tests.parallel.splits import SPLITS

BLOCK_SIZE = 4


@dataclass(kw_only=True)
class UnjoinedRank:
    """What layers see of a rank while they are built; nothing can be sent."""

    layout: ParallelLayout
    rank: int
    joins_dp_ranks: bool = False
    groups: dict[str, Any] = field(default_factory=dict)

    @property
    def dp_rank(self) -> int:
        return self.layout.dp_rank(self.rank)

    def group(self, name: str) -> Any:
        alone = contiguous(self.layout.world_size, 1)
        return self.groups.get(name) or self.register_group(
            name, subgroups=self.layout.partitions.get(name, alone)
        )

    def register_group(self, name: str, *, subgroups: Any) -> Any:
        ranks = next(ranks for ranks in subgroups if self.rank in ranks)
        group = SimpleNamespace(ranks=ranks, rank=ranks.index(self.rank), size=len(ranks))
        return self.groups.setdefault(name, group)


@cache
def layout_of(split: str) -> ParallelLayout:
    """Of a split of tests/parallel/splits.py, or of "alone"."""
    if split == "alone":
        return ParallelLayout()
    return ParallelLayout.of(load_config(SPLITS[split][1]).parallel)


def context_of(layout: ParallelLayout, rank: int, dtype: torch.dtype) -> ModelContext:
    """What the model of one rank is built with."""
    return ModelContext(
        platform=CpuPlatform(),
        dtype=dtype,
        block_size=BLOCK_SIZE,
        comm=UnjoinedRank(layout=layout, rank=rank),  # type: ignore[arg-type]
    )
