import socket

import pytest

from inferkit.config.schema import ParallelConfig
from inferkit.core.errors import AddressError, ConfigError
from inferkit.core.listening import reserved
from inferkit.core.place import LOOPBACK
from inferkit.runtime.place import Node, find_node, local_addresses

NODES = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
TWO_EACH = ParallelConfig(world_size=6, devices_per_node=2, node_ips=NODES, master_port=29500)


def test_one_node_holds_all_ranks_on_loopback():
    parallel = ParallelConfig(world_size=3)
    node = find_node(parallel, variables={}, addresses=["10.0.0.9"])
    places = node.places(parallel, master_port=1234)
    assert [(place.rank, place.local_rank) for place in places] == [(0, 0), (1, 1), (2, 2)]
    assert {place.local_world_size for place in places} == {3}
    assert {(place.master_addr, place.local_ip) for place in places} == {(LOOPBACK, LOOPBACK)}
    assert {place.master_port for place in places} == {1234}


@pytest.mark.parametrize(
    "variables, addresses",
    [
        ({}, ["127.0.0.1", "10.0.0.2"]),
        ({"NODE_RANK": ""}, ["127.0.0.1", "10.0.0.2"]),
        ({"NODE_RANK": "1"}, ["10.0.0.2", "10.0.0.1"]),
    ],
    ids=["by its address", "an empty NODE_RANK", "by NODE_RANK"],
)
def test_a_node_is_found(variables, addresses):
    node = find_node(TWO_EACH, variables=variables, addresses=addresses)
    places = node.places(TWO_EACH, master_port=29500)
    assert node.node_rank == 1
    assert [(place.rank, place.local_rank) for place in places] == [(2, 0), (3, 1)]
    assert {place.local_ip for place in places} == {"10.0.0.2"}
    assert {place.master_addr for place in places} == {"10.0.0.1"}
    assert {place.world_size for place in places} == {6}


@pytest.mark.parametrize(
    "variables, addresses, message",
    [
        ({}, ["10.9.9.9"], r"none of parallel.node_ips=\[10.0.0.1,10.0.0.2,10.0.0.3\] .*10.9.9.9"),
        ({}, ["10.0.0.1", "10.0.0.2"], "several of parallel.node_ips.*set NODE_RANK"),
        ({"NODE_RANK": "3"}, ["10.0.0.1"], "NODE_RANK=3 is no node of .*use 0 to 2"),
        ({"NODE_RANK": "one"}, ["10.0.0.1"], "NODE_RANK=one is no node of"),
        ({"NODE_RANK": "2"}, ["10.0.0.1"], "NODE_RANK=2 is the node 10.0.0.3, which is no address"),
    ],
)
def test_a_machine_that_is_no_node_is_refused(variables, addresses, message):
    with pytest.raises(ConfigError, match=message):
        find_node(TWO_EACH, variables=variables, addresses=addresses)


def test_a_further_node_without_a_list_of_nodes_is_refused():
    with pytest.raises(ConfigError, match="NODE_RANK=1 but parallel.node_ips=.* no further node"):
        find_node(ParallelConfig(), variables={"NODE_RANK": "1"})
    assert find_node(ParallelConfig(), variables={"NODE_RANK": "0"}).num_nodes == 1


def test_an_unknown_host_name_is_refused():
    nodes = ["no-such-host.invalid", "10.0.0.2"]
    parallel = ParallelConfig(world_size=2, node_ips=nodes, master_port=29500)
    with pytest.raises(ConfigError, match="no-such-host.invalid is no address"):
        find_node(parallel, variables={}, addresses=["10.0.0.2"])


def test_own_addresses_include_loopback():
    assert LOOPBACK in local_addresses()


def test_a_reserved_port_can_be_listened_on_but_is_given_to_nobody():
    with reserved(LOOPBACK, 0) as port, socket.socket() as server:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((LOOPBACK, port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((LOOPBACK, port))
        server.listen()


def test_a_port_in_use_is_refused():
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(AddressError, match=f"parallel.master_port={port} cannot be used") as one,
            Node().reserved_port(ParallelConfig(world_size=2, master_port=port)),
        ):
            pass
        assert one.value.fix == "parallel.master_port=0"
        node = Node(num_nodes=2, local_ip=LOOPBACK)
        parallel = ParallelConfig(world_size=2, node_ips=NODES[:2], master_port=port)
        with pytest.raises(AddressError, match="on every node") as several:
            node.reserved_port(parallel).__enter__()
        assert int(several.value.fix.removeprefix("parallel.master_port=")) not in (0, port)


def test_only_the_first_node_reserves_the_port():
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        parallel = ParallelConfig(world_size=2, node_ips=NODES[:2], master_port=port)
        node = find_node(parallel, variables={}, addresses=["10.0.0.2"])
        with node.reserved_port(parallel) as found:
            assert found == port
