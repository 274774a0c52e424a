"""What follows from a configuration: groups of ranks, shares of a rank, KV cache. Torch-free.

The one source of such numbers for `check`, `explain`, `diff` and reports.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from inferkit.config.check import Checked
from inferkit.config.cluster_roles import CLUSTER, INSTANCES
from inferkit.config.memory import rank_share
from inferkit.config.schema import InferenceConfig
from inferkit.config.shares import RankShare
from inferkit.core.cache_spec import DTYPE_BYTES
from inferkit.core.parallel_layout import HeadLayout, ParallelLayout
from inferkit.inspect.derived_cache import kv_cache_values
from inferkit.inspect.groups import group_formula, partition_text
from inferkit.inspect.snapshot import Derived
from inferkit.inspect.wording import size_text

WITHOUT_RANKS = ("router", "cluster")
"""Roles whose own process starts none."""
GROUPS = "groups"
"""Node of the groups of ranks; one rank alone has none."""
DERIVED_NAMES = (
    "parallel.attn_dp_size",
    "parallel.moe_ep_size",
    "parallel.embed_dp_size",
    "parallel.ranks_per_node",
    "scheduler.batch_size_per_dp_rank",
    "rank.heads",
    "rank.kv_heads",
    "rank.experts",
    "model.parameters",
    "rank.parameters",
    "rank.weight_bytes",
    "rank.kv_bytes_per_token",
    "kv_cache.block_bytes",
    "kv_cache.blocks_per_request",
    "kv_cache.blocks_wanted",
    "kv_cache.blocks",
    "kv_cache.pool_bytes",
    "kv_cache.concurrent_requests",
)
"""All others; not every configuration has all of them."""


def derived_of(
    checked: Checked, *, num_blocks: Mapping[str, int] | None = None
) -> tuple[Derived, ...]:
    """Of a checked configuration, nothing where its faults make sizes wrong. Those of a cluster's
    instances have their role before the name.

    Args:
        num_blocks: pool -> the blocks that a run had; None = it has not run.
    """
    config = checked.sized
    if config is None:
        return ()
    if config.role != CLUSTER:
        return derived_values(
            config, checked.files.arch, memory=checked.memory, num_blocks=num_blocks
        )
    sides = {role: checked.roles[role] for role in INSTANCES if role in checked.roles}
    sizes = {role: side.sized for role, side in sides.items() if side.sized is not None}
    if len(sizes) < len(INSTANCES):
        return ()
    found = [_cluster_ranks(config, sizes)]
    for role, sized in sizes.items():
        side = sides[role]
        for one in derived_values(sized, side.files.arch, memory=side.memory):
            found.append(replace(one, name=f"{role}.{one.name}"))
    return tuple(found)


def _cluster_ranks(config: InferenceConfig, sides: Mapping[str, InferenceConfig]) -> Derived:
    """Of all instances; each rank has a device."""
    counts = [
        (getattr(config.cluster, role), side.parallel.world_size) for role, side in sides.items()
    ]
    numbers = " + ".join(f"{count} * {world}" for count, world in counts)
    return Derived(
        name="cluster.ranks",
        value=sum(count * world for count, world in counts),
        formula=f"prefill instances * their ranks + the same of decode = {numbers}",
        unit="ranks",
    )


def derived_values(
    config: InferenceConfig,
    arch: Any | None,
    *,
    memory: int = 0,
    num_blocks: Mapping[str, int] | None = None,
) -> tuple[Derived, ...]:
    """Everything that can be derived, sizes before what is made of them.

    Args:
        config: with automatic values resolved.
        arch: what `parse_arch` of the model's family returned; None = its files are not here.
        memory: bytes that each rank has; 0 = as platform.device_memory says, if it does.
        num_blocks: pool -> the blocks that a run had; None = it has not run.
    """
    if config.role in WITHOUT_RANKS:
        return ()
    found = [*_sizes(config), *_groups(config)]
    if arch is not None:
        share = rank_share(config, arch)
        found += [*_heads(share), *_experts(share), *_weights(config, share)]
        memory = memory or config.platform.device_memory
        found += kv_cache_values(config, share, memory=memory, num_blocks=num_blocks)
    return tuple(found)


def _sizes(config: InferenceConfig) -> Iterator[Derived]:
    parallel, scheduler = config.parallel, config.scheduler
    world = parallel.world_size
    for name, by in (
        ("attn_dp_size", "attn_tp_size"),
        ("moe_ep_size", "moe_tp_size"),
        ("embed_dp_size", "embed_tp_size"),
    ):
        yield Derived(
            name=f"parallel.{name}",
            value=getattr(parallel, name),
            formula=f"world_size / {by} = {world} / {getattr(parallel, by)}",
            unit="ranks",
        )
    per_node = parallel.devices_per_node
    yield Derived(
        name="parallel.ranks_per_node",
        value=parallel.ranks_per_node,
        formula="devices_per_node" if per_node else "world_size: all ranks are on this node",
        unit="ranks",
    )
    yield Derived(
        name="scheduler.batch_size_per_dp_rank",
        value=config.batch_size_per_dp_rank,
        formula="scheduler.batch_size / attn_dp_size = "
        f"{scheduler.batch_size} / {parallel.attn_dp_size}",
        unit="requests",
    )


def _groups(config: InferenceConfig) -> Iterator[Derived]:
    """Of one rank alone there are none."""
    layout = ParallelLayout.of(config.parallel)
    if layout.world_size == 1:
        return
    for name, groups in layout.all_partitions.items():
        yield Derived(
            name=f"{GROUPS}.{name}",
            value=[list(ranks) for ranks in groups],
            formula=group_formula(layout, name),
            unit="ranks",
            text=partition_text(groups),
        )


def _heads(share: RankShare) -> Iterator[Derived]:
    heads = share.heads
    if heads is None:
        return
    yield Derived(
        name="rank.heads",
        value=heads.num_local_heads,
        formula=f"{_padded('query heads', heads.num_heads, heads.padded_heads)} / "
        f"attn_tp_size = {heads.padded_heads} / {heads.tp_size}",
        unit="heads",
        text=f"{heads.num_local_heads} of "
        + _with_padding("query heads", heads.num_heads, heads.padded_heads)
        + ("; the latent of keys and values is on all" if share.has_latent else ""),
    )
    if share.has_latent:
        return
    yield Derived(
        name="rank.kv_heads",
        value=heads.num_local_kv_heads,
        formula=_kv_heads(heads),
        unit="heads",
        text=f"{heads.num_local_kv_heads} of "
        + _with_padding("KV heads", heads.num_kv_heads, heads.padded_kv_heads)
        + (f", each on {heads.num_replicas} ranks" if heads.num_replicas > 1 else ""),
    )


def _kv_heads(heads: HeadLayout) -> str:
    count = _padded("KV heads", heads.num_kv_heads, heads.padded_kv_heads)
    numbers = f"{heads.padded_kv_heads} / {heads.tp_size}"
    if heads.num_replicas > 1:
        return f"{count} on attn_tp_size = {heads.tp_size} ranks, each on {heads.num_replicas}"
    return f"{count} / attn_tp_size = {numbers}"


def _experts(share: RankShare) -> Iterator[Derived]:
    if not share.num_experts:
        return
    layout = share.layout
    part = "" if layout.moe_tp_size == 1 else f", 1/{layout.moe_tp_size} of each"
    yield Derived(
        name="rank.experts",
        value=share.num_local_experts,
        formula=f"experts of a layer / moe_ep_size = {share.num_experts} / {layout.moe_ep_size}"
        + part,
        unit="experts",
        text=f"{share.num_local_experts} of {share.num_experts} in a layer{part}",
    )


def _weights(config: InferenceConfig, share: RankShare) -> Iterator[Derived]:
    dtype = config.model.dtype.value
    total = int(share.arch.num_parameters)
    yield Derived(
        name="model.parameters", value=total, formula="of the whole model", unit="parameters"
    )
    yield Derived(
        name="rank.parameters",
        value=share.num_parameters,
        formula=_parts(share),
        unit="parameters",
    )
    yield Derived(
        name="rank.weight_bytes",
        value=share.weight_bytes,
        formula=f"rank.parameters * bytes of {dtype} = "
        f"{share.num_parameters:,} * {DTYPE_BYTES[dtype]}",
        unit="bytes",
        text=size_text(share.weight_bytes),
    )


def _parts(share: RankShare) -> str:
    """`attention 1,234 + experts 5,678 + ...`."""
    parts = share.parameter_parts
    if sum(parts.values()) != share.num_parameters:
        return "of the rank that holds most, padding included"
    return " + ".join(f"{name} {count:,}" for name, count in parts.items() if count)


def _padded(name: str, count: int, padded: int) -> str:
    return f"{count} {name}" if padded == count else f"{count} {name} padded to {padded}"


def _with_padding(name: str, count: int, padded: int) -> str:
    return f"{count} {name}" if padded == count else f"{count} {name} ({padded} with padding)"
