"""Creates the communication groups of an instance and hands them out by name.

Group membership is `core.parallel_layout`; what is sent is the layers' business.
"""

import atexit
import datetime
import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist

from inferkit.core.errors import ConfigError
from inferkit.core.parallel_layout import (
    TP_SIZES,
    ParallelLayout,
    Partition,
    Ranks,
    contiguous,
)
from inferkit.core.place import RankPlace
from inferkit.parallel.communicator import CollectiveTimer, Communicator
from inferkit.parallel.shared_memory import SharedMemory, create_shared, open_shared

logger = logging.getLogger(__name__)

CPU_BACKEND = "gloo"
"""Scheduling groups exchange a few host integers, whatever the device."""
CPU_GROUPS = frozenset({"tp_cpu_group", "dp_leader_group", "dp_group"})
OWN_COMMUNICATOR = frozenset({"moe_ep_group_mc2"})
"""Dispatch and combine must never share a communicator with other traffic."""
TIMEOUT = datetime.timedelta(minutes=30)


def join_ranks(place: RankPlace, *, backend: str) -> None:
    """Meet all ranks of the run; returns when everybody is there. `leave_ranks` undoes it.

    Ranks that have met already (a second model in the same processes) stay as they are.
    """
    if place.world_size == 1 or dist.is_initialized():
        return
    # gloo would resolve the host name, which need not be an address that others can reach.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(place.local_ip))
    is_master = place.rank == 0 and not place.is_served
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.master_addr, place.master_port, place.world_size, is_master, timeout=TIMEOUT
    )
    # A launcher's store is also others', and lives through its restarts of the ranks.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    joining = dist.PrefixStore(f"inferkit/join/{attempt}", store)  # type: ignore[attr-defined]
    # torch's threads abort the process where groups are left to the end of the interpreter.
    atexit.register(leave_ranks)
    dist.init_process_group(
        backend, store=joining, rank=place.rank, world_size=place.world_size, timeout=TIMEOUT
    )


def leave_ranks() -> None:
    """End what `join_ranks` began."""
    if dist.is_initialized():
        dist.destroy_process_group()


def interface_of(address: str) -> str:
    """Name of the network interface that has this address.

    Raises:
        ConfigError: none has it.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    raise ConfigError(f"no network interface of this node has the address {address}")


class CommManager:
    """The groups of one rank. Every rank creates all groups of a partition, in the same order.

    Groups with equal rank lists and backend share a communicator, those of `OWN_COMMUNICATOR`
    excepted. The names are those of `ParallelLayout.partitions`; models add their own with
    `register_group`.

    Args:
        backend: of the device's collectives; scheduling groups use gloo.
        local_world_size: ranks of each node, numbered one after the other (None = one node).
            Groups of CPU tensors within a node talk through shared memory.
    """

    def __init__(
        self,
        layout: ParallelLayout | None = None,
        *,
        rank: int = 0,
        backend: str = CPU_BACKEND,
        local_world_size: int | None = None,
    ) -> None:
        self.layout = layout or ParallelLayout()
        self.rank = rank
        self.backend = backend
        self.local_world_size = local_world_size or self.layout.world_size
        self.timer = CollectiveTimer()
        self.joins_dp_ranks = self.layout.cp_size > 1
        """Some layer computes tokens of several DP ranks together, so they run in lock-step."""
        self._groups: dict[str, Communicator] = {}
        self._partitions: dict[str, Partition] = {}
        self._shared: dict[tuple[Ranks, str], Communicator | None] = {}
        """None = exists, without this rank."""
        self._created: list[Communicator] = []
        self._closing = weakref.finalize(self, close_all, self._created)
        alone = tuple((rank,) for rank in range(self.layout.world_size))
        names = [f"{kind}_tp_group" for kind in TP_SIZES]
        names += ["moe_ep_group", "moe_ep_group_mc2", "cp_group"]
        names += ["dp_group", "tp_cpu_group", "dp_leader_group"]
        for name in names:
            self._create(
                name,
                self.layout.partitions.get(name, alone),
                backend=CPU_BACKEND if name in CPU_GROUPS else backend,
                own_communicator=name in OWN_COMMUNICATOR,
            )
        whole = (tuple(range(self.layout.world_size)),)
        self.world = self._create("world", whole, backend=CPU_BACKEND, own_communicator=False)

    def register_group(
        self,
        name: str,
        *,
        group_size: int = 0,
        group_stride: int = 1,
        subgroups: Sequence[Ranks] | None = None,
        own_communicator: bool = False,
    ) -> Communicator:
        """Create a group of a model's own; every rank must call this in the same order.

        Args:
            group_size: ranks of each group; with `group_stride` 1 runs of neighbours, else group
                g of a block is {g, g + stride, ...}.
            subgroups: the rank lists themselves, instead of the two sizes.

        Raises:
            ValueError: the groups are no partition of the world, or the name is taken by another.
        """
        world = self.layout.world_size
        if subgroups is not None:
            partition = tuple(tuple(ranks) for ranks in subgroups)
        elif group_size < 1 or group_stride < 1 or world % (group_size * group_stride):
            raise ValueError(
                f"group {name}: group_size={group_size} * group_stride={group_stride} does not "
                f"divide world_size={world}"
            )
        elif group_stride == 1:
            partition = contiguous(world, group_size)
        else:
            block = group_size * group_stride
            partition = tuple(
                tuple(range(base + start, base + block, group_stride))
                for base in range(0, world, block)
                for start in range(group_stride)
            )
        if sorted(rank for ranks in partition for rank in ranks) != list(range(world)):
            raise ValueError(
                f"group {name}: {list(map(list, partition))} is no partition of the ranks 0 to "
                f"{world - 1}"
            )
        if name in self._groups:
            if self._partitions[name] != partition:
                raise ValueError(
                    f"group {name} exists with the ranks {list(map(list, self._partitions[name]))}"
                )
            return self._groups[name]
        return self._create(
            name, partition, backend=self.backend, own_communicator=own_communicator
        )

    def group(self, name: str) -> Communicator:
        """This rank's group of that name.

        Raises:
            KeyError: there is none; lists those that exist.
        """
        if name not in self._groups:
            raise KeyError(f"no group {name!r}; there are {', '.join(sorted(self._groups))}")
        return self._groups[name]

    def has_group(self, name: str) -> bool:
        return name in self._groups

    def ranks(self, name: str) -> Partition:
        """Rank lists of all groups of that name."""
        self.group(name)
        return self._partitions[name]

    def close(self) -> None:
        """Give up all groups; the ranks stay joined. Also done when the process ends."""
        self._closing()

    @property
    def dp_rank(self) -> int:
        return self.layout.dp_rank(self.rank)

    @property
    def is_dp_leader(self) -> bool:
        """The one rank of its DP rank that samples and reports."""
        return self.layout.attn_tp_rank(self.rank) == 0

    def _create(
        self, name: str, partition: Partition, *, backend: str, own_communicator: bool
    ) -> Communicator:
        self._partitions[name] = partition
        # All subgroups are created, also those without this rank: creation is collective.
        for ranks in partition:
            if own_communicator and len(ranks) > 1:
                group = self._new(ranks, backend)
            else:
                group = self._communicator(ranks, backend)
            if group is not None:
                self._groups[name] = group
        return self._groups[name]

    def _communicator(self, ranks: Ranks, backend: str) -> Communicator | None:
        key = (ranks, backend)
        if key not in self._shared:
            self._shared[key] = self._new(ranks, backend)
        return self._shared[key]

    def _new(self, ranks: Ranks, backend: str) -> Communicator | None:
        """A communicator of these ranks; None where this rank is not among them."""
        process_group = shared = None
        if len(ranks) > 1:
            process_group = dist.new_group(list(ranks), backend=backend, timeout=TIMEOUT)
        if self.rank not in ranks:
            return None
        is_one_node = len({rank // self.local_world_size for rank in ranks}) == 1
        if len(ranks) > 1 and backend == CPU_BACKEND and is_one_node:
            shared = share_memory(ranks, self.rank, process_group)
        group = Communicator(
            ranks=ranks,
            rank=self.rank,
            process_group=process_group,
            shared=shared,
            timer=self.timer,
        )
        self._created.append(group)
        return group


def close_all(groups: list[Communicator]) -> None:
    """Close every group, once."""
    while groups:
        groups.pop().close()


def share_memory(ranks: Ranks, rank: int, process_group: Any) -> SharedMemory | None:
    """Memory of all these ranks, or None on all of them where one cannot reach it."""
    shared: SharedMemory | None = None
    handle: list[str | None] = [None]
    try:
        if rank == ranks[0]:
            shared, handle[0] = create_shared(len(ranks))
    except OSError as error:
        logger.warning("no shared memory for collectives: %s", error)
    dist.broadcast_object_list(handle, ranks[0], group=process_group)
    if handle[0] is not None and shared is None:
        try:
            shared = open_shared(handle[0], rank=ranks.index(rank), size=len(ranks))
        except OSError as error:
            logger.warning("the shared memory of rank %d is out of reach: %s", ranks[0], error)
    is_good = torch.tensor(shared is not None, dtype=torch.int64)
    dist.all_reduce(is_good, dist.ReduceOp.MIN, group=process_group)
    if not is_good and shared is not None:
        shared.close()
        shared = None
    return shared
