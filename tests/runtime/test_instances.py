"""Instances of a role, by lists of addresses that need not be of this machine."""

from dataclasses import replace

import pytest

from inferkit.config.schema import DisaggConfig, InferenceConfig, ParallelConfig
from inferkit.core.errors import ConfigError
from inferkit.core.place import LOOPBACK
from inferkit.runtime.instances import find_instance, leaders, num_nodes_of

PREFILL = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]
DECODE = ["10.0.1.1", "10.0.1.2"]


def config(role="prefill", *, world_size=32, devices_per_node=16, **disagg):
    lists = {"prefill_ips": PREFILL, "decode_ips": DECODE} | disagg
    return InferenceConfig(
        role=role,
        parallel=ParallelConfig(world_size=world_size, devices_per_node=devices_per_node),
        disagg=DisaggConfig(**lists),
    )


def at(address, role="prefill", variables=None, **sizes):
    return find_instance(config(role, **sizes), variables=variables or {}, addresses=[address])


@pytest.mark.parametrize(
    "world_size, devices_per_node, num_nodes",
    [(32, 16, 2), (16, 16, 1), (8, 16, 1), (8, 0, 1), (128, 8, 16)],
)
def test_nodes_of_an_instance(world_size, devices_per_node, num_nodes):
    parallel = ParallelConfig(world_size=world_size, devices_per_node=devices_per_node)
    assert num_nodes_of(parallel) == num_nodes


def test_ranks_that_do_not_divide_among_nodes_are_refused():
    with pytest.raises(ConfigError, match="world_size=24 does not divide among nodes of .*=16"):
        num_nodes_of(ParallelConfig(world_size=24, devices_per_node=16))


def test_leaders_are_the_first_nodes_of_the_instances():
    assert leaders(PREFILL, 2, key="disagg.prefill_ips") == ["10.0.0.1", "10.0.0.3"]
    assert leaders(DECODE, 1, key="disagg.decode_ips") == DECODE
    with pytest.raises(ConfigError, match=r"disagg.prefill_ips=\[10.*\] has 4 .* takes 3 nodes"):
        leaders(PREFILL, 3, key="disagg.prefill_ips")


@pytest.mark.parametrize(
    "address, index, node_rank, leader",
    [
        ("10.0.0.1", 0, 0, "10.0.0.1"),
        ("10.0.0.2", 0, 1, "10.0.0.1"),
        ("10.0.0.3", 1, 0, "10.0.0.3"),
        ("10.0.0.4", 1, 1, "10.0.0.3"),
    ],
)
def test_two_nodes_make_an_instance(address, index, node_rank, leader):
    place = at(address)

    assert (place.index, place.num_instances, place.leader_ip) == (index, 2, leader)
    assert place.is_leader == (node_rank == 0)
    assert place.node_index == 2 * index + node_rank
    ranks = place.node.places(config().parallel, master_port=6038)
    assert [rank.rank for rank in ranks] == list(range(16 * node_rank, 16 * node_rank + 16))
    assert [rank.local_rank for rank in ranks] == list(range(16))
    assert {rank.master_addr for rank in ranks} == {leader}
    assert {rank.local_ip for rank in ranks} == {address}


def test_every_node_is_an_instance_where_one_holds_all_ranks():
    place = at("10.0.1.2", "decode", world_size=16)

    assert (place.index, place.num_instances, place.is_leader) == (1, 2, True)
    assert (place.leader_ip, place.node.local_ip) == ("10.0.1.2", "10.0.1.2")
    assert place.node.master_addr == LOOPBACK, "its ranks meet on their own node"


def test_a_place_in_the_list_is_chosen_by_node_rank():
    own = [LOOPBACK, *PREFILL]  # as on a machine that plays all nodes
    place = find_instance(config(), variables={"NODE_RANK": "3"}, addresses=own)
    assert (place.index, place.node.node_rank) == (1, 1)


@pytest.mark.parametrize("role", ["prefill", "decode", "serve"])
def test_without_a_list_a_role_is_one_instance_on_loopback(role):
    cfg = config(role, world_size=2, devices_per_node=0, prefill_ips=[], decode_ips=[])
    place = find_instance(cfg, variables={}, addresses=["10.0.0.1"])

    assert (place.index, place.num_instances, place.is_leader) == (0, 1, True)
    assert (place.leader_ip, place.node.local_ip) == (LOOPBACK, LOOPBACK)
    assert len(place.node.places(cfg.parallel, master_port=1)) == 2


def test_the_other_role_s_list_does_not_count():
    cfg = config("serve", world_size=1, devices_per_node=0)
    assert find_instance(cfg, variables={}, addresses=["10.0.0.2"]).num_instances == 1
    cfg = config("decode", world_size=1, devices_per_node=0, decode_ips=[])
    assert find_instance(cfg, variables={}, addresses=["10.0.0.2"]).num_instances == 1


@pytest.mark.parametrize(
    "variables, addresses, message",
    [
        ({}, ["10.9.9.9"], r"none of disagg.prefill_ips=\[10.0.0.1,.*it has 10.9.9.9.*NODE_RANK"),
        ({}, ["10.0.0.1", "10.0.0.4"], "several of disagg.prefill_ips.*set NODE_RANK"),
        ({"NODE_RANK": "4"}, ["10.0.0.1"], "NODE_RANK=4 is no node of disagg.*use 0 to 3"),
        ({"NODE_RANK": "x"}, ["10.0.0.1"], "NODE_RANK=x is no node of disagg"),
        ({"NODE_RANK": "1"}, ["10.0.0.1"], "NODE_RANK=1 is the node 10.0.0.2 of disagg.pre"),
    ],
)
def test_a_machine_without_a_place_is_refused(variables, addresses, message):
    with pytest.raises(ConfigError, match=message):
        find_instance(config(), variables=variables, addresses=addresses)


def test_several_nodes_need_a_list():
    cfg = config(prefill_ips=[])
    with pytest.raises(ConfigError, match="world_size=32 takes 2 nodes .* in disagg.prefill_ips"):
        find_instance(cfg, variables={}, addresses=[])
    single = replace(cfg, parallel=ParallelConfig())
    with pytest.raises(ConfigError, match="NODE_RANK=1 names a further node, but disagg.prefill"):
        find_instance(single, variables={"NODE_RANK": "1"}, addresses=[])


def test_an_unknown_host_name_is_refused():
    cfg = config(prefill_ips=["no-such-host.invalid"], world_size=1, devices_per_node=0)
    with pytest.raises(ConfigError, match="disagg.prefill_ips: no-such-host.invalid is no address"):
        find_instance(cfg, variables={}, addresses=["10.0.0.2"])
