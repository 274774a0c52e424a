"""Which bytes travel for a request, as few descriptors as the layout allows.

A cache tensor is [blocks, block size, heads, dim] (platforms/paged_cache.py), so the heads of one
token are adjacent and a range of heads is one piece per token, `heads * dim` values apart:

    all heads of both ranks   a block is one piece; blocks that follow each other on both sides
                              are one, too
    a range of the heads      a block is `block size` pieces at equal distances: one strided
                              descriptor; blocks that follow each other are one here, too

So there are at most (blocks x tensors) descriptors in either case, or fewer after merging. They are
rows of `inferkit.core.protocols.StridedRun`, which every engine takes; one that can only move plain
runs expands them itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inferkit.core.cache_spec import DTYPE_BYTES, CacheSpec
from inferkit.core.errors import InferkitError
from inferkit.core.protocols import StridedRun
from inferkit.core.transfer_messages import Handshake, TensorAddress
from inferkit.kv_transfer.layout import kv_head_layout
from inferkit.kv_transfer.rank_mapping import HeadRun, head_runs

Ints = npt.NDArray[np.int64]
NULL_BLOCK = 0
NUM_COLUMNS = len(StridedRun._fields)


class TransferPlanError(InferkitError, ValueError):
    """Tensors or blocks of the two sides do not fit together; the transfer fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheTensor:
    """One cache tensor of one rank in registered memory."""

    layer_idx: int
    tensor_idx: int
    manager_key: str
    block_size: int
    num_heads: int
    head_bytes: int
    num_blocks: int
    region: int
    offset: int

    @property
    def token_bytes(self) -> int:
        return self.num_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes


def cache_tensors(
    specs: Sequence[CacheSpec],
    addresses: Sequence[TensorAddress],
    num_blocks: Mapping[str, int],
) -> list[CacheTensor]:
    """The tensors of one rank's layers at their addresses.

    Raises:
        TransferPlanError: an address names a tensor or manager key that no spec has.
    """
    by_layer = {spec.layer_idx: spec for spec in specs}
    tensors = []
    for address in addresses:
        spec = by_layer.get(address.layer_idx)
        if spec is None or address.tensor_idx >= len(spec.dims):
            raise TransferPlanError(f"{address} names no cache tensor of this model")
        if spec.manager_key not in num_blocks:
            raise TransferPlanError(
                f"no number of blocks is given for {spec.manager_key!r}; given are "
                f"{sorted(num_blocks)}"
            )
        tensors.append(
            CacheTensor(
                layer_idx=spec.layer_idx,
                tensor_idx=address.tensor_idx,
                manager_key=spec.manager_key,
                block_size=spec.block_size,
                num_heads=spec.num_heads,
                head_bytes=spec.dims[address.tensor_idx] * DTYPE_BYTES[spec.dtype],
                num_blocks=num_blocks[spec.manager_key],
                region=address.region,
                offset=address.offset,
            )
        )
    return tensors


class _Entry(NamedTuple):
    """Heads that are adjacent on both sides, of one tensor."""

    source: CacheTensor
    target: CacheTensor
    heads: HeadRun

    @property
    def is_whole(self) -> bool:
        return self.heads.num_heads == self.source.num_heads == self.target.num_heads

    def columns(self, sources: Ints, targets: Ints, lengths: Ints) -> Ints:
        """[n, 8] descriptors of n runs of blocks."""
        source, target, heads = self
        n = len(sources)
        rows = np.empty((n, NUM_COLUMNS), np.int64)
        head_bytes = source.head_bytes
        rows[:, 0] = source.region
        rows[:, 1] = source.offset + sources * source.block_bytes + heads.source * head_bytes
        rows[:, 2] = target.region
        rows[:, 3] = target.offset + targets * target.block_bytes + heads.target * head_bytes
        if self.is_whole:
            rows[:, 4] = lengths * source.block_bytes
            rows[:, 5:] = (1, 0, 0)
        else:
            rows[:, 4] = heads.num_heads * head_bytes
            rows[:, 5] = lengths * source.block_size
            rows[:, 6:] = (source.token_bytes, target.token_bytes)
        return rows


class LinkPlan:
    """What one prefill rank sends to one decode rank; made once, used for every request.

    Args:
        sources, targets: tensors of the prefill rank and of the decode rank. Tensors that only one
            side has (MTP layers) are left out.
        head_runs: layer -> heads that this link moves; a layer may move none.

    Raises:
        TransferPlanError: a tensor differs in block size or bytes per head. The handshake of the
            layouts refuses such pairs before; this is the last line.
    """

    def __init__(
        self,
        *,
        sources: Sequence[CacheTensor],
        targets: Sequence[CacheTensor],
        head_runs: Mapping[int, Sequence[HeadRun]],
    ) -> None:
        there = {(tensor.layer_idx, tensor.tensor_idx): tensor for tensor in targets}
        self._entries: dict[str, list[_Entry]] = {}
        self._limits: dict[str, tuple[int, int, int]] = {}
        for source in sources:
            target = there.get((source.layer_idx, source.tensor_idx))
            if target is None:
                continue
            self._check(source, target)
            key = source.manager_key
            self._limits[key] = (source.block_size, source.num_blocks, target.num_blocks)
            self._entries.setdefault(key, []).extend(
                _Entry(source, target, run) for run in head_runs.get(source.layer_idx, ())
            )

    @staticmethod
    def _check(source: CacheTensor, target: CacheTensor) -> None:
        for name in ("manager_key", "block_size", "head_bytes"):
            ours, theirs = getattr(source, name), getattr(target, name)
            if ours != theirs:
                raise TransferPlanError(
                    f"layer {source.layer_idx} tensor {source.tensor_idx}: {name} is {ours!r} on "
                    f"the prefill side and {theirs!r} on the decode side"
                )

    def descriptors(
        self,
        source_blocks: Mapping[str, Sequence[int]],
        target_blocks: Mapping[str, Sequence[int]],
        *,
        first_token: int,
        end_token: int,
        is_last: bool,
    ) -> Ints:
        """[n, 8] rows of `StridedRun` for the tokens [first_token, end_token) of a request.

        Only full blocks travel before the last chunk, so a block travels once. Null blocks of the
        target are places that decode will not read (before a sliding window) and are left out.

        Raises:
            TransferPlanError: a block list is too short, a block does not exist, or decode wants
                one that prefill does not have any more.
        """
        parts = [np.empty((0, NUM_COLUMNS), np.int64)]
        for key, entries in self._entries.items():
            block_size = self._limits[key][0]
            first, end = block_range(first_token, end_token, block_size, is_last=is_last)
            runs = self._block_runs(key, source_blocks, target_blocks, first, end)
            if runs is not None:
                parts += [entry.columns(*runs) for entry in entries]
        return np.concatenate(parts)

    def _block_runs(
        self,
        key: str,
        source_blocks: Mapping[str, Sequence[int]],
        target_blocks: Mapping[str, Sequence[int]],
        first: int,
        end: int,
    ) -> tuple[Ints, Ints, Ints] | None:
        """(source, target, length) of runs of blocks that follow each other on both sides."""
        _, num_sources, num_targets = self._limits[key]
        sources = _blocks(source_blocks, key, first, end, num_sources, "prefill")
        targets = _blocks(target_blocks, key, first, end, num_targets, "decode")
        is_wanted = targets != NULL_BLOCK
        is_missing = is_wanted & (sources == NULL_BLOCK)
        if is_missing.any():
            raise TransferPlanError(
                f"{key}: decode wants block {first + int(is_missing.argmax())} of the request, "
                "which prefill holds no more"
            )
        sources, targets = sources[is_wanted], targets[is_wanted]
        if not len(sources):
            return None
        breaks = (np.diff(sources) != 1) | (np.diff(targets) != 1)
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        lengths = np.diff(np.concatenate((starts, [len(sources)])))
        return sources[starts], targets[starts], lengths


def plan_for(
    handshake: Handshake,
    *,
    specs: Sequence[CacheSpec],
    num_kv_heads: Mapping[int, int],
    sources: Sequence[CacheTensor],
    tp_size: int,
    tp_rank: int,
) -> LinkPlan:
    """The plan of the link to the decode rank that sent a Handshake.

    Args:
        specs, sources: caches of this prefill rank, and where their tensors lie.
        num_kv_heads: layer -> KV heads of the model, without padding.
    """
    memory = handshake.memory
    decode_tp_size = memory.attn_tp_size
    decode_tp_rank = handshake.decode_rank % decode_tp_size
    target_specs = []
    runs = {}
    for spec in specs:
        total = num_kv_heads[spec.layer_idx]
        num_heads = kv_head_layout(total, decode_tp_size).num_local_kv_heads
        target_specs.append(replace(spec, num_heads=num_heads))
        pairs = head_runs(total, tp_size, decode_tp_size)
        runs[spec.layer_idx] = pairs.get((tp_rank, decode_tp_rank), [])
    known = {spec.layer_idx for spec in specs}
    # Layers that only decode has (MTP) are none of this plan.
    addresses = [address for address in memory.tensors if address.layer_idx in known]
    targets = cache_tensors(target_specs, addresses, memory.num_blocks)
    return LinkPlan(sources=sources, targets=targets, head_runs=runs)


def _blocks(
    blocks: Mapping[str, Sequence[int]], key: str, first: int, end: int, limit: int, side: str
) -> Ints:
    ids = np.asarray(blocks.get(key, ())[first:end], np.int64)
    if len(ids) < end - first:
        raise TransferPlanError(
            f"{key}: the {side} side has {len(blocks.get(key, ()))} blocks of the request, "
            f"{end} are to be sent"
        )
    if len(ids) and not 0 <= ids.min() <= ids.max() < limit:
        raise TransferPlanError(
            f"{key}: the {side} side names block {int(ids.max())}; its blocks are 0..{limit - 1}"
        )
    return ids


def block_range(
    first_token: int, end_token: int, block_size: int, *, is_last: bool
) -> tuple[int, int]:
    """[first, end) of the blocks to send for a chunk: those that it completes, and with the last
    chunk the one that stays partly filled."""
    end = -(-end_token // block_size) if is_last else end_token // block_size
    return first_token // block_size, end
