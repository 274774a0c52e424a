"""Which instance of its role this node belongs to, and which node of that instance it is.

A role's list of addresses holds its instances one after the other, each an equal run of nodes. The
first node of a run leads: it has the HTTP interface. The others only hold ranks. Torch-free.
"""

import os
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from inferkit.config.schema import InferenceConfig, ParallelConfig
from inferkit.core.errors import ConfigError
from inferkit.core.place import LOOPBACK
from inferkit.runtime.place import NODE_RANK, Node, find_node, local_addresses

LISTS: Mapping[str, str] = {"prefill": "disagg.prefill_ips", "decode": "disagg.decode_ips"}
"""Role -> the list that holds the addresses of its nodes."""


@dataclass(frozen=True, kw_only=True)
class InstancePlace:
    """This node among all nodes of its role."""

    node: Node
    """Within the instance; its ranks meet at the leader."""
    index: int = 0
    """Of the instance."""
    num_instances: int = 1
    leader_ip: str = LOOPBACK

    @property
    def is_leader(self) -> bool:
        """Whether this node has the HTTP interface, and for prefill the bootstrap server."""
        return self.node.node_rank == 0

    @property
    def node_index(self) -> int:
        """Position in the role's list."""
        return self.index * self.node.num_nodes + self.node.node_rank


def num_nodes_of(parallel: ParallelConfig) -> int:
    """Nodes that one instance takes: max(1, world_size / devices_per_node).

    Raises:
        ConfigError: the ranks do not divide among nodes.
    """
    world_size, per_node = parallel.world_size, parallel.ranks_per_node
    if world_size > per_node and world_size % per_node:
        raise ConfigError(
            f"parallel.world_size={world_size} does not divide among nodes of "
            f"parallel.devices_per_node={per_node} ranks; choose a multiple of it"
        )
    return max(1, world_size // per_node)


def find_node_rank(config: InferenceConfig) -> int:
    """Of this machine among the nodes of a run, or of its instance; 0 = the first, or the only one.

    Raises:
        ConfigError: it is none of them.
    """
    if config.role is not None:
        return find_instance(config).node.node_rank
    return find_node(config.parallel).node_rank


def leaders(ips: Sequence[str], num_nodes: int, *, key: str) -> list[str]:
    """Addresses of the first node of every instance: every `num_nodes`-th of the list.

    Args:
        key: what the list is called in errors.

    Raises:
        ConfigError: the last instance is not complete.
    """
    if len(ips) % num_nodes:
        raise ConfigError(
            f"{key}={_list(ips)} has {len(ips)} addresses, but one instance takes {num_nodes} "
            "nodes (parallel.world_size / parallel.devices_per_node); list every node of every "
            "instance, the leader of each first"
        )
    return list(ips[::num_nodes])


def find_instance(
    config: InferenceConfig,
    *,
    variables: Mapping[str, str] = os.environ,
    addresses: Collection[str] | None = None,
) -> InstancePlace:
    """The place of this machine in its role's list: by NODE_RANK, else by its own addresses.

    A role without a list is one instance on this node, on loopback.

    Args:
        addresses: of this machine (None = ask it).

    Raises:
        ConfigError: it has no place, or several.
    """
    key = LISTS.get(config.role or "", "")
    listed = [] if not key else getattr(config.disagg, key.rpartition(".")[2])
    if not listed:
        return InstancePlace(node=_alone(config, key, variables))
    num_nodes = num_nodes_of(config.parallel)
    ips = [_resolve(name, key) for name in listed]
    leading = leaders(ips, num_nodes, key=key)
    own = local_addresses() if addresses is None else addresses
    position = _position(ips, listed, key=key, variables=variables, own=own)
    index, node_rank = divmod(position, num_nodes)
    return InstancePlace(
        node=Node(
            node_rank=node_rank,
            num_nodes=num_nodes,
            local_ip=ips[position],
            master_addr=leading[index] if num_nodes > 1 else LOOPBACK,
        ),
        index=index,
        num_instances=len(leading),
        leader_ip=leading[index],
    )


def _alone(config: InferenceConfig, key: str, variables: Mapping[str, str]) -> Node:
    num_nodes = num_nodes_of(config.parallel)
    if num_nodes > 1:
        raise ConfigError(
            f"parallel.world_size={config.parallel.world_size} takes {num_nodes} nodes of "
            f"{config.parallel.ranks_per_node} ranks; list their addresses in {key}"
        )
    if (variables.get(NODE_RANK) or "0") != "0":
        where = f"{key} is empty: list all nodes of the role there" if key else "the run has one"
        raise ConfigError(
            f"{NODE_RANK}={variables[NODE_RANK]} names a further node, but {where}, or unset "
            f"{NODE_RANK}"
        )
    return Node()


def _position(
    ips: Sequence[str],
    listed: Sequence[str],
    *,
    key: str,
    variables: Mapping[str, str],
    own: Collection[str],
) -> int:
    shown, known = f"{key}={_list(listed)}", ", ".join(sorted(own))
    given = variables.get(NODE_RANK)
    if given:
        if not given.isdecimal() or int(given) >= len(ips):
            raise ConfigError(
                f"{NODE_RANK}={given} is no node of {shown}; use 0 to {len(ips) - 1}, in their "
                "order"
            )
        position = int(given)
        if ips[position] not in own:
            raise ConfigError(
                f"{NODE_RANK}={given} is the node {listed[position]} of {key}, which is no address "
                f"of this machine (it has {known}); correct {NODE_RANK} or the list"
            )
        return position
    found = [position for position, ip in enumerate(ips) if ip in own]
    if len(found) != 1:
        which = "several" if found else "none"
        raise ConfigError(
            f"{which} of {shown} is an address of this machine (it has {known}); set {NODE_RANK} "
            "to this node's position in the list, or correct the list"
        )
    return found[0]


def _resolve(name: str, key: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(
            f"{key}: {name} is no address and no host name that is known here ({error})"
        ) from error


def _list(names: Sequence[str]) -> str:
    return f"[{','.join(names)}]"
