"""What every layer of a model is built with."""

from dataclasses import dataclass, field
from typing import Any

import torch

from inferkit.parallel.comm_manager import CommManager
from inferkit.platforms.base import Platform


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """Device, number type, cache geometry and ranks of the model under construction."""

    platform: Platform
    dtype: torch.dtype
    block_size: int
    comm: CommManager = field(default_factory=CommManager)
    force_eplb: bool = False
    """Replace the choice of experts by a perfectly balanced one."""

    @property
    def factory(self) -> dict[str, Any]:
        """Keyword arguments for tensor constructors."""
        return {"dtype": self.dtype, "device": self.platform.device}

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialised parameter: a loader fills it."""
        return torch.nn.Parameter(torch.empty(*shape, **self.factory), requires_grad=False)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")
