"""Where the KV cache of one rank lies, as its transfer engine and its peers name it.

One region holds the caches of all layers, another one the 64-byte cells: the metadata slots of a
decode rank, or the place from which a prefill rank writes slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from inferkit.core.cache_spec import CacheSpec
from inferkit.core.protocols import TransferEngine
from inferkit.core.transfer_messages import TargetMemory, TensorAddress
from inferkit.kv_transfer.layout import LayoutError
from inferkit.kv_transfer.metadata_slot import SLOT_BYTES
from inferkit.kv_transfer.transfer_plan import CacheTensor, cache_tensors


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Made by `register_memory`."""

    specs: Sequence[CacheSpec]
    num_blocks: Mapping[str, int]
    """Per manager key, the null block included."""
    caches: Mapping[int, tuple[torch.Tensor, ...]]
    """Layer -> its tensors [blocks, block size, heads, dim]."""
    addresses: tuple[TensorAddress, ...]
    cells: torch.Tensor
    """[n * 64] uint8."""
    cells_region: int

    @property
    def num_cells(self) -> int:
        return len(self.cells) // SLOT_BYTES

    @property
    def cell_bytes(self) -> memoryview:
        """The cells as writable host memory."""
        return self.cells.numpy().data

    @cached_property
    def num_kv_heads(self) -> dict[int, int]:
        """Layer -> KV heads of the model, without padding."""
        return {
            spec.layer_idx: total
            for spec, total in zip(self.specs, model_heads(self.specs), strict=True)
        }

    @cached_property
    def tensors(self) -> list[CacheTensor]:
        return cache_tensors(self.specs, self.addresses, self.num_blocks)

    def target(self, description: Mapping[str, Any], *, attn_tp_size: int) -> TargetMemory:
        """What a decode rank tells prefill ranks; `description` is that of its started engine."""
        return TargetMemory(
            engine=dict(description),
            attn_tp_size=attn_tp_size,
            tensors=self.addresses,
            num_blocks=dict(self.num_blocks),
            slot_region=self.cells_region,
        )


def register_memory(
    engine: TransferEngine,
    *,
    specs: Sequence[CacheSpec],
    caches: Sequence[tuple[torch.Tensor, ...]],
    buffer: torch.Tensor,
    num_blocks: Mapping[str, int],
    num_cells: int,
) -> RankMemory:
    """Let the engine reach the KV cache of this rank, and cells that it allocates.

    Comes before the engine's first `describe`.

    Args:
        caches: tensors of each spec's layer, inside `buffer`.
        buffer: [n] uint8, from the engine's `allocate`.
        num_cells: metadata slots of a decode rank, one per request that it may hold; for a prefill
            rank the slots that it can write at the same time.

    Raises:
        ValueError: a tensor has another shape than its spec says, or lies outside of the buffer.
    """
    region = engine.register(buffer).region_id
    addresses = []
    for spec, tensors in zip(specs, caches, strict=True):
        for tensor_idx, (tensor, dim) in enumerate(zip(tensors, spec.dims, strict=True)):
            shape = (num_blocks[spec.manager_key], spec.block_size, spec.num_heads, dim)
            offset = tensor.data_ptr() - buffer.data_ptr()
            is_inside = 0 <= offset <= buffer.nbytes - tensor.nbytes
            if tensor.shape != shape or not tensor.is_contiguous() or not is_inside:
                raise ValueError(
                    f"cache tensor {tensor_idx} of layer {spec.layer_idx} has shape "
                    f"{list(tensor.shape)} at byte {offset}; expected is {list(shape)}, "
                    f"contiguous, inside {buffer.nbytes} bytes of the transfer engine"
                )
            addresses.append(TensorAddress(spec.layer_idx, tensor_idx, region, offset))
    cells = engine.allocate(num_cells * SLOT_BYTES)
    return RankMemory(
        specs=tuple(specs),
        num_blocks=dict(num_blocks),
        caches={spec.layer_idx: tensors for spec, tensors in zip(specs, caches, strict=True)},
        addresses=tuple(addresses),
        cells=cells,
        cells_region=engine.register(cells).region_id,
    )


def model_heads(specs: Sequence[CacheSpec]) -> list[int]:
    """KV heads of each layer's model, without padding, as `layout.layer_layouts` wants them.

    Raises:
        LayoutError: the model does not tell.
    """
    heads = []
    for spec in specs:
        if spec.num_model_heads is None:
            raise LayoutError(
                f"layer {spec.layer_idx} does not say how many KV heads the model has, so its "
                "cache cannot be handed over; give its Attention num_model_kv_heads"
            )
        heads.append(spec.num_model_heads)
    return heads
