"""Which ranks work together on what: pure integer arithmetic, no process, no torch.

Source: reference section 1.6 (groups) and design section 8 (padding). Ranks are numbered 0 to
world_size - 1; attention TP is innermost, so a DP rank is a run of `attn_tp_size` ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Ranks = tuple[int, ...]
Partition = tuple[Ranks, ...]
"""Groups of one kind: every rank is in exactly one."""

TP_SIZES = ("attn", "embed", "lmhead", "dense", "shared", "o_proj", "moe")
"""Kinds of layers with a TP size of their own: `parallel.<kind>_tp_size`, `<kind>_tp_group`."""


def contiguous(world_size: int, group_size: int) -> Partition:
    """{0..n-1}, {n..2n-1}, ..."""
    return tuple(
        tuple(range(start, start + group_size)) for start in range(0, world_size, group_size)
    )


def strided(world_size: int, group_size: int) -> Partition:
    """Group g is {g, g + s, g + 2s, ...} with s = world_size / group_size."""
    stride = world_size // group_size
    return tuple(tuple(range(start, world_size, stride)) for start in range(stride))


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Groups of all ranks of one instance.

    Raises:
        ValueError: a size does not divide the world, or prefill context parallelism is asked for
            where it cannot be.
    """

    world_size: int = 1
    attn_tp_size: int = 1
    embed_tp_size: int = 1
    lmhead_tp_size: int = 1
    dense_tp_size: int = 1
    shared_tp_size: int = 1
    o_proj_tp_size: int = 1
    moe_tp_size: int = 1
    cp_size: int = 1

    def __post_init__(self) -> None:
        for fault in layout_faults(self):
            raise ValueError(str(fault))

    @classmethod
    def of(cls, parallel: Any) -> "ParallelLayout":
        """The layout of a `parallel` node."""
        names = ["world_size", *(f"{kind}_tp_size" for kind in TP_SIZES), "cp_size"]
        return cls(**{name: getattr(parallel, name) for name in names})

    @property
    def attn_dp_size(self) -> int:
        return self.world_size // self.attn_tp_size

    @property
    def moe_ep_size(self) -> int:
        return self.world_size // self.moe_tp_size

    @property
    def embed_dp_size(self) -> int:
        return self.world_size // self.embed_tp_size

    def tp_size(self, kind: str) -> int:
        size: int = getattr(self, f"{kind}_tp_size")
        return size

    def attn_tp_rank(self, rank: int) -> int:
        return rank % self.attn_tp_size

    def dp_rank(self, rank: int) -> int:
        """Which data-parallel rank (set of requests) a rank belongs to."""
        return rank // self.attn_tp_size

    def dp_span(self, kind: str) -> int:
        """DP ranks whose tokens one group of this kind computes together."""
        return max(1, self.tp_size(kind) // self.attn_tp_size)

    @cached_property
    def partitions(self) -> Mapping[str, Partition]:
        """Those of `all_partitions` in which any ranks work together."""
        return {
            name: parts
            for name, parts in self.all_partitions.items()
            if any(len(ranks) > 1 for ranks in parts)
        }

    @cached_property
    def all_partitions(self) -> Mapping[str, Partition]:
        """Group name -> its partition.

        `moe_ep_group_mc2` has the ranks of `moe_ep_group` and a communicator of its own.
        `tp_cpu_group` and `dp_leader_group` are of scheduling (gloo); `dp_group` joins the ranks
        that hold the same share of the attention, one of each DP rank.
        """
        world, group = self.world_size, self.attn_tp_size * self.cp_size
        found = {f"{kind}_tp_group": contiguous(world, self.tp_size(kind)) for kind in TP_SIZES}
        found["moe_ep_group"] = strided(world, self.moe_ep_size)
        found["moe_ep_group_mc2"] = found["moe_ep_group"]
        found["cp_group"] = contiguous(world, self.cp_size)
        found["dp_group"] = strided(world, self.attn_dp_size)
        found["tp_cpu_group"] = contiguous(world, group)
        leaders = tuple(range(0, world, group))
        others = tuple((rank,) for rank in range(world) if rank % group)
        found["dp_leader_group"] = (leaders, *others)
        return found

    def dp_partition(self, kind: str) -> Partition:
        """Per group of this kind and per attention TP rank: one rank of each of its DP ranks."""
        span, tp_size = self.dp_span(kind), self.attn_tp_size
        return tuple(
            tuple(range(base + tp_rank, base + span * tp_size, tp_size))
            for base in range(0, self.world_size, span * tp_size)
            for tp_rank in range(tp_size)
        )


@dataclass(frozen=True)
class LayoutFault:
    """One size that cannot be."""

    size: str
    value: int
    problem: str

    def __str__(self) -> str:
        return f"{self.size}={self.value} {self.problem}"


def layout_faults(parallel: Any) -> Iterator[LayoutFault]:
    """Everything that keeps these sizes from being a layout; `parallel` has the fields of one."""
    world, attn = parallel.world_size, parallel.attn_tp_size
    if world < 1:
        yield LayoutFault("world_size", world, "is out of range; allowed is >= 1")
        return
    sound = True
    for name in [*(f"{kind}_tp_size" for kind in TP_SIZES), "cp_size"]:
        size = getattr(parallel, name)
        if size < 1 or world % size:
            sound = False
            divisors = [n for n in range(1, world + 1) if world % n == 0]
            yield LayoutFault(
                name, size, f"does not divide world_size={world}; allowed is {_some(divisors)}"
            )
    if not sound:
        return
    for kind in TP_SIZES:
        size = getattr(parallel, f"{kind}_tp_size")
        if max(size, attn) % min(size, attn):
            yield LayoutFault(
                f"{kind}_tp_size",
                size,
                f"and attn_tp_size={attn} do not nest; one must be a multiple of the other",
            )
    if parallel.cp_size > 1 and parallel.cp_size != world:
        yield LayoutFault(
            "cp_size", parallel.cp_size, f"must be 1 or equal world_size={world} (all ranks)"
        )
    if parallel.cp_size > 1 and attn != 1:
        yield LayoutFault(
            "attn_tp_size",
            attn,
            f"must be 1 with cp_size={parallel.cp_size}: context parallelism"
            " splits a prompt's tokens, not its heads",
        )


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def padded_size(size: int, tp_size: int) -> int:
    """The smallest multiple of `tp_size` that is not below `size`."""
    return -(-size // tp_size) * tp_size


def local_size(size: int, tp_size: int) -> int:
    """The share of one rank, padded to be equal on all."""
    return padded_size(size, tp_size) // tp_size


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """How attention heads divide among `tp_size` ranks, with padding (design section 8).

    KV heads are padded to the smallest count that divides or is divided by `tp_size`; where there
    are fewer KV heads than ranks each lies on `num_replicas` ranks, which share its query heads.
    Padded heads have zero weights, so they add exactly nothing.
    """

    num_heads: int
    num_kv_heads: int
    tp_size: int = 1

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @cached_property
    def padded_kv_heads(self) -> int:
        count = self.num_kv_heads
        while count % self.tp_size and self.tp_size % count:
            count += 1
        return count

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same KV head."""
        return max(1, self.tp_size // self.padded_kv_heads)

    @property
    def padded_heads(self) -> int:
        return self.padded_kv_heads * padded_size(self.heads_per_kv_head, self.num_replicas)

    @property
    def num_local_kv_heads(self) -> int:
        return max(1, self.padded_kv_heads // self.tp_size)

    @property
    def num_local_heads(self) -> int:
        return self.padded_heads // self.tp_size

    def kv_heads(self, tp_rank: int) -> list[int | None]:
        """The KV heads of a rank, in order; None is padding."""
        first = tp_rank * self.num_local_kv_heads // self.num_replicas
        heads = range(first, first + self.num_local_kv_heads)
        return [head if head < self.num_kv_heads else None for head in heads]

    def heads(self, tp_rank: int) -> list[int | None]:
        """The query heads of a rank, those of one KV head together; None is padding."""
        per_kv_head = self.heads_per_kv_head
        share = self.num_local_heads // self.num_local_kv_heads
        start = tp_rank % self.num_replicas * share
        return [
            kv_head * per_kv_head + idx if kv_head is not None and idx < per_kv_head else None
            for kv_head in self.kv_heads(tp_rank)
            for idx in range(start, start + share)
        ]
