"""What a device must offer. Everything above talks to this interface only."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from inferkit.core.place import RankPlace
from inferkit.platforms.paged_cache import PagedCache


class Platform(ABC):
    """A device of one rank. The constructor stores; `start` touches the device.

    Args:
        version: device generation where that changes behaviour, else None.
        enable_weight_nz: bring weights into the device's own layout after loading.
        num_threads: CPU threads of a rank (0 = automatic).
        device_memory: bytes to plan with (0 = ask the device).
    """

    name: str
    device: torch.device
    comm_backend: str
    """torch.distributed backend of collectives between devices of this kind."""

    def __init__(
        self,
        *,
        version: str | None = None,
        enable_weight_nz: bool = True,
        num_threads: int = 0,
        device_memory: int = 0,
    ) -> None:
        self.version = version
        self.enable_weight_nz = enable_weight_nz
        self.num_threads = num_threads
        self.device_memory = device_memory
        self.cache = PagedCache(device=self.device)

    @abstractmethod
    def start(self, place: RankPlace) -> None:
        """Bind this process to its device; call once, before any tensor is made.

        `place` says which of the node's devices it is, and with how many ranks it shares the node.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished what was launched."""

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that this rank may still allocate."""

    @abstractmethod
    def peak_memory(self) -> int:
        """Most bytes that this rank has held at once."""

    @abstractmethod
    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A [N, K] weight in the layout that `linear` is fastest with; only `linear` reads it."""

    @abstractmethod
    def linear(
        self, x_TK: torch.Tensor, weight: torch.Tensor, bias_N: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, N] = x @ weight.T + bias, with a plain or packed weight."""

    @abstractmethod
    def profiler_activities(self) -> list[Any]:
        """Activities for torch.profiler."""
