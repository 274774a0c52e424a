"""How a parameter takes its share of a checkpoint tensor, and reads nothing else of it.

Knows slices and padding, not files: the loader hands in tensors that were not read yet.
"""

from typing import Protocol

import torch


class StoredTensor(Protocol):
    """A checkpoint tensor that lies on disk until `read`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, *index: slice) -> torch.Tensor:
        """The part selected by one slice (step 1) per leading dimension; none = all of it."""
        ...


def load_slice(
    target: torch.Tensor,
    stored: StoredTensor,
    *,
    dim: int,
    start: int,
    source_dim: int | None = None,
) -> None:
    """Fill `target` with [start, start + target.shape[dim]) of `stored` along `dim`.

    What lies beyond the end of `stored` is padding and becomes zero. `source_dim` is the dimension
    of `stored` that `dim` of `target` runs along, where they differ (a squeezed target).
    """
    source_dim = dim if source_dim is None else source_dim
    size = target.shape[dim]
    end = min(start + size, stored.shape[source_dim])
    if end < start + size:
        target.data.zero_()
    if end > start:
        part = stored.read(*[slice(None)] * source_dim, slice(start, end))
        target.data.narrow(dim, 0, end - start).copy_(part)
