import multiprocessing
import os
import socket
import threading

import pytest

from inferkit.core.errors import ConfigError, WorkerError
from inferkit.core.place import LOOPBACK
from inferkit.runtime.fork_server import start_fork_server
from inferkit.runtime.launched import (
    Launched,
    check_launched,
    find_launched,
    first_host,
    meeting,
)
from inferkit.runtime.peer_watch import PeerLostError
from inferkit.runtime.place import reserved_port

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


def launched(rank, world_size, port, **changes):
    return Launched(
        launcher="torchrun",
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        master_addr=LOOPBACK,
        master_port=port,
        **changes,
    )


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
    assert found.is_one_node and found.master_addr == "node07"


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
    check_launched(launched(0, 4, 0), 4)
    with pytest.raises(ConfigError) as caught:
        check_launched(launched(0, 4, 0), 1)
    for text in ("4 processes", "parallel.world_size=1", "parallel=tp4", "--nproc-per-node 1"):
        assert text in str(caught.value)
    with pytest.raises(ConfigError, match="configure 3 ranks, or start 2"):
        check_launched(launched(0, 3, 0), 2)


def be_rank(rank, world_size, port, run_dir, outcomes):
    """Main function of a rank in a process of its own: meets the others, then ends in its way."""

    def make_run_dir():
        if run_dir is None:
            raise PermissionError("read-only file system")
        return run_dir

    try:
        with meeting(launched(rank, world_size, port), make_run_dir) as met:
            if rank == 2:
                os._exit(1)
            if world_size > 2:
                threading.Event().wait(60)
            met.has_finished = True
            outcomes.put((rank, met.place, met.run_dir))
    except Exception as error:
        outcomes.put((rank, error, None))


def meet_all(world_size, run_dir):
    """What each rank has got: (place, run directory) or (error, None)."""
    start_fork_server("torch.distributed")
    context = multiprocessing.get_context("forkserver")
    outcomes = context.SimpleQueue()
    with reserved_port(0, host=LOOPBACK) as port:
        ranks = [
            context.Process(target=be_rank, args=(rank, world_size, port, run_dir, outcomes))
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
    found = {}
    while not outcomes.empty():
        rank, *outcome = outcomes.get()
        found[rank] = outcome
    return found


def test_ranks_meet_and_take_the_run_directory_of_rank_0(tmp_path):
    found = meet_all(2, tmp_path / "run")
    places = [place for place, _ in found.values()]
    assert {run_dir for _, run_dir in found.values()} == {tmp_path / "run"}
    assert sorted(place.rank for place in places) == [0, 1]
    (port,) = {place.master_port for place in places}
    assert port > 0
    assert {place.local_ip for place in places} == {LOOPBACK}


def test_ranks_learn_that_rank_0_cannot_make_the_directory():
    found = meet_all(2, None)
    assert isinstance(found[0][0], PermissionError)
    assert isinstance(found[1][0], WorkerError)
    assert "rank 0 cannot make the run directory: read-only" in str(found[1][0])


def test_a_rank_that_ends_is_named_by_all_others(tmp_path):
    found = meet_all(4, tmp_path / "run")
    assert sorted(found) == [0, 1, 3]
    for error, _ in found.values():
        assert isinstance(error, PeerLostError)
        assert "rank 2 has ended before the run has" in str(error)


def test_a_port_in_use_is_told_by_rank_0(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        rank_0 = launched(0, 2, other.getsockname()[1])
        with (
            pytest.raises(WorkerError, match="cannot listen on port .* set MASTER_PORT"),
            meeting(rank_0, lambda: tmp_path),
        ):
            pass


def test_a_rank_0_that_is_not_there_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("inferkit.runtime.launched.MEETING_TIMEOUT_S", 1)
    with reserved_port(0, host=LOOPBACK) as port:
        rank_1 = launched(1, 2, port)
        with (
            pytest.raises(WorkerError, match="rank 1: nothing answers at 127.0.0.1"),
            meeting(rank_1, lambda: tmp_path),
        ):
            pass
