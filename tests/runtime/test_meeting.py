import ctypes
import multiprocessing
import os
import socket
import threading
import time

import pytest

from inferkit.core.errors import ConfigError, WorkerError
from inferkit.core.listening import reserved
from inferkit.core.place import LOOPBACK, RankPlace
from inferkit.runtime.fork_server import start_fork_server
from inferkit.runtime.meeting import meeting
from inferkit.runtime.rank_errors import PeerLostError


def place(rank, world_size, port):
    return RankPlace(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        master_port=port,
    )


def finish(met):
    met.has_finished = True


def die_on_rank_2(met):
    if met.place.rank == 2:
        os._exit(1)
    threading.Event().wait(60)


def fail_on_rank_2(met):
    if met.place.rank == 2:
        raise ValueError("rank 2 is broken")
    threading.Event().wait(60)


def lose_a_connection(met):
    """A collective tells of the loss before the watch does."""
    if met.place.rank == 2:
        time.sleep(0.3)
        os._exit(1)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")


def block_on_rank_0(met):
    """Rank 0 is in code that does not return when rank 2 dies, as gloo is."""
    about_to_block = met.run_dir / "about_to_block"
    if met.place.rank == 2:
        while not about_to_block.exists():
            time.sleep(0.05)
        time.sleep(1)
        os._exit(1)
    if met.place.rank == 0:
        lock = ctypes.CDLL(None).pthread_mutex_lock
        mutex = ctypes.create_string_buffer(64)
        lock(mutex)
        about_to_block.parent.mkdir(exist_ok=True)
        about_to_block.touch()
        lock(mutex)  # waits for ever, and no signal interrupts it
    threading.Event().wait(60)


def be_rank(rank, world_size, port, run_dir, act, outcomes):
    """Main function of a rank: meets the others, then acts."""

    def make_run_dir():
        if run_dir is None:
            raise PermissionError("read-only file system")
        return run_dir

    def on_stuck(error):
        outcomes.put((rank, "stuck", error))

    try:
        with meeting(
            place(rank, world_size, port), on_stuck=on_stuck, make_run_dir=make_run_dir
        ) as met:
            act(met)
            outcomes.put((rank, met.place, met.run_dir))
    except Exception as error:
        outcomes.put((rank, type(error).__name__, error))


def meet_all(world_size, run_dir, act=finish):
    """Rank -> (its place, the run directory), or (name of its error, the error)."""
    start_fork_server("torch.distributed")
    context = multiprocessing.get_context("forkserver")
    outcomes = context.SimpleQueue()
    with reserved(LOOPBACK, 0) as port:
        ranks = [
            context.Process(target=be_rank, args=(rank, world_size, port, run_dir, act, outcomes))
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
            assert rank.exitcode is not None, "a rank does not end"
    found = {}
    while not outcomes.empty():
        rank, *outcome = outcomes.get()
        found[rank] = outcome
    return found


def test_ranks_take_the_run_directory_and_the_port_of_rank_0(tmp_path):
    found = meet_all(2, tmp_path / "run")
    places = [place for place, _ in found.values()]
    assert {run_dir for _, run_dir in found.values()} == {tmp_path / "run"}
    assert sorted(place.rank for place in places) == [0, 1]
    (port,) = {place.master_port for place in places}
    assert port > 0


def test_ranks_learn_that_rank_0_cannot_make_the_directory():
    found = meet_all(2, None)
    assert found[0][0] == "PermissionError" and found[1][0] == "WorkerError"
    assert "rank 0 cannot make the run directory: read-only" in str(found[1][1])


@pytest.mark.parametrize("act", [die_on_rank_2, fail_on_rank_2, lose_a_connection])
def test_a_rank_that_ends_is_named_by_all_others(tmp_path, act):
    found = meet_all(4, tmp_path / "run", act)
    assert sorted(set(found) - {2}) == [0, 1, 3]
    for rank in (0, 1, 3):
        assert isinstance(found[rank][1], PeerLostError), found
        assert "rank 2 has ended, or its node cannot be reached" in str(found[rank][1])


def test_a_rank_whose_main_thread_hears_nothing_ends_too(tmp_path):
    found = meet_all(3, tmp_path / "run", block_on_rank_0)
    assert found[0][0] == "stuck"
    assert found[1][0] == "PeerLostError"
    assert "rank 2 has ended" in str(found[0][1])


def test_a_port_in_use_is_told_by_rank_0(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        rank_0 = place(0, 2, other.getsockname()[1])
        with (
            pytest.raises(WorkerError, match="cannot listen on port .* set parallel.master_port"),
            meeting(rank_0, on_stuck=print),
        ):
            pass


def test_a_rank_0_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr("inferkit.runtime.meeting.TIMEOUT_S", 1)
    with (
        reserved(LOOPBACK, 0) as port,
        pytest.raises(WorkerError, match="rank 1: nothing answers at 127.0.0.1"),
        meeting(place(1, 2, port), on_stuck=print),
    ):
        pass


def test_ranks_that_do_not_come_are_counted(monkeypatch):
    monkeypatch.setattr("inferkit.runtime.meeting.TIMEOUT_S", 1)
    with (
        reserved(LOOPBACK, 0) as port,
        pytest.raises(WorkerError, match="1 of 3 ranks are there"),
        meeting(place(0, 3, port), on_stuck=print),
    ):
        pass


def test_a_rank_of_another_configuration_is_refused_on_both_sides():
    """The last one believes in another number of ranks, so that rank 0 would wait for ever."""
    facts = {"parallel.world_size": "2", "model.dtype": "float32", "data.seed": "None"}
    other = facts | {"parallel.world_size": "3", "data.seed": "7"}
    faults = {}

    def meet(own_place, own_facts):
        try:
            with meeting(own_place, on_stuck=print, facts=own_facts):
                faults[own_place.rank] = "met"
        except ConfigError as error:
            faults[own_place.rank] = str(error)

    with reserved(LOOPBACK, 0) as port:
        stranger = threading.Thread(target=meet, args=(place(2, 3, port), other))
        stranger.start()
        meet(place(0, 2, port), facts)
        stranger.join(30)
    assert (
        faults[0]
        == faults[2]
        == (
            "rank 2 was started with another configuration than rank 0: parallel.world_size=3 "
            "(rank 0: 2), data.seed=7 (rank 0: None); start all ranks with the same options"
        )
    )
