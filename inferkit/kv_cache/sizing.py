"""How many blocks each attention type gets. Pure arithmetic on bytes and tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inferkit.core.cache_spec import CacheKind, CacheSpec, window_blocks
from inferkit.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share block tables."""

    manager_key: str
    kind: CacheKind
    block_size: int
    window: int | None
    bytes_per_block: int
    """Of all layers of the group together."""


def group_specs(specs: Sequence[CacheSpec]) -> list[CacheGroup]:
    """Unite specs by `manager_key`, in order of first appearance.

    Raises:
        ConfigError: layers of one key differ in kind, block size or window.
    """
    members: dict[str, list[CacheSpec]] = {}
    for spec in specs:
        members.setdefault(spec.manager_key, []).append(spec)
    groups = []
    for key, layers in members.items():
        shapes = {(spec.kind, spec.block_size, spec.window) for spec in layers}
        if len(shapes) != 1:
            raise ConfigError(
                f"cache specs with manager_key={key!r} differ in (kind, block_size, window): "
                f"{sorted(map(str, shapes))}; give each its own manager_key"
            )
        kind, block_size, window = shapes.pop()
        groups.append(
            CacheGroup(
                manager_key=key,
                kind=kind,
                block_size=block_size,
                window=window,
                bytes_per_block=sum(spec.bytes_per_block for spec in layers),
            )
        )
    return groups


def size_pools(
    groups: Sequence[CacheGroup],
    *,
    num_blocks: int,
    max_model_len: int,
    max_num_requests: int,
    enable_prefix_cache: bool,
    available_bytes: int,
) -> Mapping[str, int]:
    """Blocks per manager key, each with its null block.

    A given `num_blocks` is taken as it is. Otherwise sliding windows, whose need is fixed, come
    first; full attention gets what `max_num_requests` of `max_model_len` need (twice that with
    the prefix cache), or what memory leaves.

    Raises:
        ConfigError: memory does not hold one request of `max_model_len`.
    """
    if num_blocks:
        return {group.manager_key: num_blocks for group in groups}
    sizes: dict[str, int] = {}
    left = available_bytes
    for group in groups:
        if group.window is not None:
            # One request at a time computes a chunk and holds a second window meanwhile.
            per_request = min(
                window_blocks(group.window, group.block_size),
                math.ceil(max_model_len / group.block_size),
            )
            num_windows = max_num_requests * (2 if enable_prefix_cache else 1) + 1
            sizes[group.manager_key] = num_windows * per_request + 1
            left -= sizes[group.manager_key] * group.bytes_per_block
    if left < 0:
        raise ConfigError(
            f"the sliding-window cache of {max_num_requests} requests needs "
            f"{available_bytes - left} bytes, {available_bytes} are available; lower "
            "scheduler.batch_size or raise kv_cache.mem_fraction"
        )
    full = [group for group in groups if group.window is None]
    for group in full:
        per_request = math.ceil(max_model_len / group.block_size)
        wanted = max_num_requests * per_request * (2 if enable_prefix_cache else 1) + 1
        share = group.bytes_per_block / sum(other.bytes_per_block for other in full)
        affordable = int(left * share) // group.bytes_per_block
        sizes[group.manager_key] = min(wanted, affordable)
        if affordable < per_request + 1:
            raise ConfigError(
                f"engine.max_model_len={max_model_len} needs {per_request + 1} KV blocks of "
                f"{group.bytes_per_block} bytes, but memory leaves room for {max(0, affordable)}; "
                "lower engine.max_model_len (or data.input_truncated_len, "
                "scheduler.max_new_tokens), raise kv_cache.mem_fraction, or free memory"
            )
    return sizes
