"""Group membership over real processes (the pure arithmetic is in tests/core)."""

from typing import Any

import pytest

from inferkit.core.errors import ConfigError
from inferkit.core.parallel_layout import ParallelLayout
from inferkit.core.place import RankPlace
from inferkit.parallel.comm_manager import CommManager, interface_of

NAMES = (
    "attn_tp_group",
    "embed_tp_group",
    "lmhead_tp_group",
    "moe_tp_group",
    "moe_ep_group",
    "moe_ep_group_mc2",
    "dp_leader_group",
    "tp_cpu_group",
)


def members(place: RankPlace, sizes: dict[str, int]) -> dict[str, Any]:
    """Who really answers in each group, and which groups share a communicator."""
    layout = ParallelLayout(world_size=place.world_size, **sizes)
    comm = CommManager(layout, rank=place.rank)
    try:
        found: dict[str, Any] = {
            name: comm.group(name).all_gather_objects(place.rank) for name in NAMES
        }
        groups = {name: comm.group(name) for name in NAMES}
        found["shared"] = {
            frozenset(other for other in NAMES if groups[other] is group)
            for group in groups.values()
        }
        own = comm.register_group("own", group_size=2, group_stride=place.world_size // 2)
        found["own"] = own.all_gather_objects(place.rank)
        found["is_same"] = (
            comm.register_group("twin", group_size=2, group_stride=place.world_size // 2) is own
        )
        separate = comm.register_group("apart", group_size=2, own_communicator=True)
        found["is_apart"] = separate is not comm.group("attn_tp_group")
        found["is_dp_leader"] = comm.is_dp_leader
    finally:
        comm.close()
    return found


def test_the_example_of_the_reference_on_eight_ranks(ranks):
    """Reference section 1.6: world 8, attn 2, moe 2, embed 8, lmhead 2."""
    sizes = {"attn_tp_size": 2, "moe_tp_size": 2, "embed_tp_size": 8, "lmhead_tp_size": 2}
    for rank, found in enumerate(ranks(8).run(members, sizes)):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        stride = list(range(rank % 2, 8, 2))
        assert found["attn_tp_group"] == found["lmhead_tp_group"] == found["moe_tp_group"] == pair
        assert found["embed_tp_group"] == list(range(8))
        assert found["moe_ep_group"] == found["moe_ep_group_mc2"] == stride
        assert found["tp_cpu_group"] == pair
        assert found["dp_leader_group"] == ([0, 2, 4, 6] if rank % 2 == 0 else [rank])
        assert found["is_dp_leader"] is (rank % 2 == 0)
        assert {"attn_tp_group", "lmhead_tp_group", "moe_tp_group", "tp_cpu_group"} in found[
            "shared"
        ]
        assert {"moe_ep_group_mc2"} in found["shared"], "dispatch shares its communicator"
        assert found["own"] == [rank % 4, rank % 4 + 4]
        assert found["is_same"] and found["is_apart"]


def test_tp_and_dp_together_on_four_ranks(ranks):
    """Reference section 10 item 7: the leaders are ranks 0 and 2, and nobody else."""
    outputs = ranks(4).run(members, {"attn_tp_size": 2})
    assert [found["tp_cpu_group"] for found in outputs] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [found["dp_leader_group"] for found in outputs] == [[0, 2], [1], [0, 2], [3]]


def test_unknown_groups_and_wrong_partitions_are_named():
    comm = CommManager()
    with pytest.raises(KeyError, match="no group 'tp'; there are attn_tp_group, .*world"):
        comm.group("tp")
    with pytest.raises(ValueError, match="group odd: group_size=2 .* does not divide world_size=1"):
        comm.register_group("odd", group_size=2)
    with pytest.raises(ValueError, match="is no partition of the ranks 0 to 0"):
        comm.register_group("twice", subgroups=[(0,), (0,)])
    comm.register_group("mine", group_size=1)
    assert comm.has_group("mine") and comm.ranks("mine") == ((0,),)


def test_an_address_that_no_interface_has_is_an_error():
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match="no network interface .* 192.0.2.77"):
        interface_of("192.0.2.77")
