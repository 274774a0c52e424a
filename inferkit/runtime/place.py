"""How the ranks of a run that this command starts find their places: nodes, addresses, ports.

Torch-free. A process that torchrun or srun has started finds its place by `launched`.
"""

import contextlib
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import psutil

from inferkit.config.role_rules import leaves
from inferkit.config.schema import InferenceConfig, ParallelConfig
from inferkit.core.errors import ConfigError
from inferkit.core.listening import reserved
from inferkit.core.place import LOOPBACK, RankPlace
from inferkit.core.secrets import recorded

NODE_RANK = "NODE_RANK"
OWN_TO_A_NODE = frozenset(
    {
        "model.path",
        "data.dataset_path",
        "data.run_seed",
        "platform.num_threads",
        "platform.device_memory",
    }
)
ANY_ADDRESS = ""
MASTER_KEYS = ("address", "parallel.master_port")


@dataclass(frozen=True, kw_only=True)
class Node:
    """This machine among those of a run."""

    node_rank: int = 0
    num_nodes: int = 1
    local_ip: str = LOOPBACK
    master_addr: str = LOOPBACK

    def places(self, parallel: ParallelConfig, *, master_port: int) -> list[RankPlace]:
        """Of the ranks that run here; nodes hold equal runs of ranks."""
        local_world_size = parallel.world_size // self.num_nodes
        first = self.node_rank * local_world_size
        return [
            RankPlace(
                rank=first + local_rank,
                local_rank=local_rank,
                world_size=parallel.world_size,
                local_world_size=local_world_size,
                master_addr=self.master_addr,
                master_port=master_port,
                local_ip=self.local_ip,
            )
            for local_rank in range(local_world_size)
        ]

    @contextlib.contextmanager
    def reserved_port(self, parallel: ParallelConfig) -> Iterator[int]:
        """Where the ranks meet: a port of the first node, reserved there."""
        if self.node_rank:
            yield parallel.master_port
            return
        is_one = self.num_nodes == 1
        host = LOOPBACK if is_one else ANY_ADDRESS
        with reserved(host, parallel.master_port, keys=MASTER_KEYS, is_agreed=not is_one) as port:
            yield port


def find_node(
    parallel: ParallelConfig,
    *,
    variables: Mapping[str, str] = os.environ,
    addresses: Collection[str] | None = None,
) -> Node:
    """Which of `parallel.node_ips` this machine is: by NODE_RANK, else by its own addresses.

    Args:
        addresses: of this machine (None = ask it).

    Raises:
        ConfigError: it is none of them.
    """
    num_nodes = max(1, len(parallel.node_ips))
    if num_nodes == 1:
        if (variables.get(NODE_RANK) or "0") != "0":
            raise ConfigError(
                f"{NODE_RANK}={variables[NODE_RANK]} but parallel.node_ips="
                f"{_list(parallel.node_ips)} names no further node; list the addresses of all "
                f"nodes, the master first, or unset {NODE_RANK}"
            )
        return Node()
    own = local_addresses() if addresses is None else addresses
    ips = [_resolve(name) for name in parallel.node_ips]
    node_rank = _node_rank(parallel, ips, variables, own)
    if ips[node_rank] not in own:
        raise ConfigError(
            f"{NODE_RANK}={node_rank} is the node {parallel.node_ips[node_rank]}, which is no "
            f"address of this machine (it has {', '.join(sorted(own))}); correct {NODE_RANK} or "
            "parallel.node_ips"
        )
    return Node(
        node_rank=node_rank, num_nodes=num_nodes, local_ip=ips[node_rank], master_addr=ips[0]
    )


def _node_rank(
    parallel: ParallelConfig,
    ips: list[str],
    variables: Mapping[str, str],
    own: Collection[str],
) -> int:
    given = variables.get(NODE_RANK)
    listed = _list(parallel.node_ips)
    if given:
        if not given.isdecimal() or int(given) >= len(ips):
            raise ConfigError(
                f"{NODE_RANK}={given} is no node of parallel.node_ips={listed}; use 0 to "
                f"{len(ips) - 1}, in their order"
            )
        return int(given)
    found = [rank for rank, ip in enumerate(ips) if ip in own]
    if len(found) != 1:
        which = "several" if found else "none"
        raise ConfigError(
            f"{which} of parallel.node_ips={listed} is an address of this machine (it has "
            f"{', '.join(sorted(own))}); set {NODE_RANK} to this node's position in the list, "
            "or correct the list"
        )
    return found[0]


def _list(names: list[str]) -> str:
    return f"[{','.join(names)}]"


def _resolve(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(
            f"parallel.node_ips: {name} is no address and no host name that is known here ({error})"
        ) from error


def local_addresses() -> set[str]:
    """IPv4 addresses of this machine."""
    return {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    }


def common_facts(config: InferenceConfig) -> dict[str, str]:
    """Keys of a configuration that must be equal on all nodes, with their values.

    Nodes may keep files at places of their own and differ in cores and memory; the seeds of all
    requests are those of rank 0.
    """
    return {
        key: str(recorded(value)) for key, value in leaves("", config) if key not in OWN_TO_A_NODE
    }
