"""A checkpoint tensor without a checkpoint."""

import torch


class InMemory:
    """A stored tensor that lies in memory, and counts how often it is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.num_reads = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, *index: slice) -> torch.Tensor:
        self.num_reads += 1
        return self.tensor[index]
