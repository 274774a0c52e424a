"""A digest of the KV that one link moves, computed alike on both sides.

It covers what a request will read and nothing else: layers in order, their tensors, the heads of
the link, and of each block that decode holds the tokens below `kv_len`; so neither padding nor
what lay in a block before plays a role.
"""

import hashlib
from collections.abc import Mapping, Sequence
from enum import IntEnum

import torch

from inferkit.core.cache_spec import CacheSpec
from inferkit.kv_transfer.rank_mapping import HeadRun, head_runs
from inferkit.kv_transfer.rank_memory import RankMemory
from inferkit.kv_transfer.transfer_plan import NULL_BLOCK

DIGEST_BYTES = 16


class Side(IntEnum):
    """Position in a `HeadRun`."""

    PREFILL = 0
    DECODE = 1


def link_heads(
    num_kv_heads: Mapping[int, int],
    *,
    prefill_tp: tuple[int, int],
    decode_tp: tuple[int, int],
) -> dict[int, list[HeadRun]]:
    """Layer -> the heads that one link moves; `*_tp` are (size, rank)."""
    pair = (prefill_tp[1], decode_tp[1])
    runs = {
        total: head_runs(total, prefill_tp[0], decode_tp[0]).get(pair, [])
        for total in set(num_kv_heads.values())
    }
    return {layer_idx: runs[total] for layer_idx, total in num_kv_heads.items()}


def link_digest(
    memory: RankMemory,
    *,
    side: Side,
    heads: Mapping[int, Sequence[HeadRun]],
    block_ids: Mapping[str, Sequence[int]],
    wanted: Mapping[str, Sequence[int]],
    kv_len: int,
) -> str:
    """The digest, in hexadecimal digits.

    Args:
        heads: layer -> heads of the link; only layers that both sides have.
        block_ids: of the request on this side.
        wanted: of the request on the decode side; 0 = a block that decode does not hold.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for spec in sorted(memory.specs, key=lambda spec: spec.layer_idx):
        runs = heads.get(spec.layer_idx, ())
        if not runs:
            continue
        blocks, num_tokens = _held_blocks(spec, block_ids, wanted, kv_len)
        for tensor in memory.caches[spec.layer_idx]:
            for run in runs:
                first = run[side]
                tokens = tensor[blocks, :, first : first + run.num_heads].flatten(0, 1)[:num_tokens]
                # [tokens, heads, dim] of adjacent bytes
                digest.update(tokens.contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _held_blocks(
    spec: CacheSpec,
    block_ids: Mapping[str, Sequence[int]],
    wanted: Mapping[str, Sequence[int]],
    kv_len: int,
) -> tuple[list[int], int]:
    """This side's ids of the blocks that decode holds, and how many tokens they have."""
    key, size = spec.manager_key, spec.block_size
    ours, theirs = block_ids.get(key, ()), wanted.get(key, ())
    held = [idx for idx in range(-(-kv_len // size)) if theirs[idx] != NULL_BLOCK]
    num_tokens = sum(min(size, kv_len - idx * size) for idx in held)
    return [ours[idx] for idx in held], num_tokens
