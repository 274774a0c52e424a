import pytest

from inferkit.core.errors import ConfigError
from inferkit.core.place import LOOPBACK, RankPlace
from inferkit.runtime.launched import Launched, check_launched, find_launched, first_host
from inferkit.runtime.place import local_addresses

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def launched(world_size, **changes):
    values = {
        "launcher": "torchrun",
        "rank": 0,
        "local_rank": 0,
        "world_size": world_size,
        "local_world_size": world_size,
        "master_addr": LOOPBACK,
        "master_port": 1234,
    }
    return Launched(**values | changes)


def test_torchrun_is_recognised():
    found = find_launched(TORCHRUN)
    assert found == Launched(
        launcher="torchrun",
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
        master_addr="node0",
        master_port=29400,
        is_served=True,
        attempt="2",
    )


def test_srun_is_recognised():
    found = find_launched(SRUN)
    assert found == Launched(
        launcher="srun",
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        master_addr="node07",
        master_port=15000 + 3456,
    )
    assert find_launched(SRUN, srun_port=29500).master_port == 29500
    assert find_launched(SRUN | {"MASTER_PORT": "1234"}).master_port == 1234


def test_srun_with_its_four_variables_alone_is_one_node():
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NODELIST")
    found = find_launched({name: SRUN[name] for name in names})
    assert found.local_world_size == 4 and found.master_addr == "node07"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"},
        SRUN | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
        {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"} | {"SLURM_JOB_CPUS_PER_NODE": "4"},
    ],
    ids=["nothing", "variables of a pod", "one task", "a step of one task", "a batch script"],
)
def test_a_process_that_runs_alone_is_no_rank(variables):
    assert find_launched(variables) is None


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match="WORLD_SIZE=two is no number"):
        find_launched(TORCHRUN | {"WORLD_SIZE": "two"})


@pytest.mark.parametrize(
    "node_list, host",
    [
        ("node3", "node3"),
        ("node3,node1", "node3"),
        ("node[03-05,09],gpu1", "node03"),
        ("gpu1,node[03-05]", "gpu1"),
        ("rack2-n[7]-ib", "rack2-n7-ib"),
        ("10.0.0.5", "10.0.0.5"),
    ],
)
def test_first_host_of_a_slurm_list(node_list, host):
    assert first_host(node_list) == host


def test_tasks_of_unequal_nodes():
    last = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x1),2", "SLURM_NODEID": "1"}
    assert find_launched(last).local_world_size == 2
    with pytest.raises(ConfigError, match="two, cannot be read"):
        find_launched(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"})


def test_another_number_of_ranks_is_refused_with_both_numbers():
    check_launched(launched(4), 4)
    with pytest.raises(ConfigError) as caught:
        check_launched(launched(4), 1)
    for text in ("4 processes", "parallel.world_size=1", "parallel=tp4", "--nproc-per-node 1"):
        assert text in str(caught.value)
    with pytest.raises(ConfigError, match="configure 3 ranks, or start 2"):
        check_launched(launched(3), 2)


def test_the_place_of_a_rank_on_one_node():
    assert launched(4, rank=2, local_rank=2).place() == RankPlace(
        rank=2, local_rank=2, world_size=4, local_world_size=4, master_port=1234
    )


def test_among_several_nodes_a_rank_has_an_address_that_others_reach():
    others = local_addresses() - {LOOPBACK}
    if len(others) != 1:
        pytest.skip("this machine has not one address beside loopback")
    for master_addr in (*others, LOOPBACK):  # some hosts know their own name as 127.0.1.1
        place = launched(4, local_world_size=2, master_addr=master_addr).place()
        assert {place.local_ip} == others
