"""One suite for all engines: what TransferEngine promises, across real processes."""

import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from inferkit.core.protocols import FenceState, WriteState
from inferkit.kv_transfer.engines.runs import TransferEngineError, expand_runs
from tests.kv_transfer.engines.hosts import Site

MIB = 1 << 20
ENDED_BADLY = {WriteState.FAILED, WriteState.LOST}


ENGINES = [
    "in_process",
    "shared_memory",
    "tcp",
    pytest.param("mooncake", marks=pytest.mark.mooncake),
]


@pytest.fixture(params=ENGINES)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site(request.param)
    yield site
    site.close()


@pytest.fixture(scope="module", params=ENGINES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """A receiver and a writer, for the tests after which both are as before."""
    site = Site(request.param)
    yield site.receiver(), site.writer()
    site.close()


@pytest.fixture
def fenced_site(site: Site) -> Site:
    """Of an engine that knows which transfers are open."""
    if not site.has_fence:
        pytest.skip(f"{site.engine} cannot refuse a write to memory that is registered")
    return site


def expected(source: Any, target: Any, runs: Any) -> Any:
    """`target` after the runs."""
    rows = np.zeros((len(runs), 8), np.int64)
    rows[:, 5] = 1
    rows[:, : len(runs[0])] = runs
    for _, start, _, to, length, _, _, _ in expand_runs(rows).tolist():
        target[to : to + length] = source[start : start + length]
    return target


def scattered(rng: Any, num_runs: int, place: int, lengths: Any) -> list[tuple[int, ...]]:
    """Runs from and to shuffled places of `place` bytes each."""
    sources, targets = rng.permutation(num_runs), rng.permutation(num_runs)
    return [
        (0, int(s) * place, 0, int(t) * place, int(n))
        for s, t, n in zip(sources, targets, lengths, strict=True)
    ]


RNG = np.random.default_rng(0)
BATCHES = {
    "one byte": [(0, 5, 0, 4096, 1)],
    "odd runs": [(0, 3, 0, 70_001, 129), (0, 999, 0, 1, 5), (0, 500_001, 0, 300_003, 123_457)],
    "blocks": scattered(RNG, 64, 16384, [16384] * 64),
    "small blocks": scattered(RNG, 4096, 256, [256] * 4096),
    "small odd runs": scattered(RNG, 4096, 256, RNG.integers(1, 256, 4096)),
    "heads of tokens": [
        (0, 128, 0, 7 * 64, 64, 1000, 512, 128),
        (0, 0, 0, 200_000, 192, 700, 512, 192),
        (0, 600_000, 0, 500_000, 300, 1, 0, 0),
    ],
    "large pieces": [(0, 100, 0, 0, 100_000, 5, 200_000, 150_000)],
}


def refusal(writer: Any, peer: int) -> str:
    """The error of the first write that does not succeed; shared memory outlives its receiver."""
    deadline = time.monotonic() + 20
    while True:
        state, error = writer.put(peer, 1, [(0, 0, 0, 0, 8)])
        if state is not WriteState.DONE:
            assert state in ENDED_BADLY
            return error
        assert time.monotonic() < deadline, "a receiver that is gone takes writes"
        time.sleep(0.005)


@pytest.mark.parametrize("batch", BATCHES)
def test_bytes_land_exactly(pair: tuple[Any, Any], batch: str) -> None:
    receiver, writer = pair
    writer.randomize(0, 7)
    receiver.fill(0, 9)
    receiver.open(1)
    peer = writer.connect(receiver.describe())
    assert writer.put(peer, 1, BATCHES[batch]) == (WriteState.DONE, "")
    before = np.full(MIB, 9, np.uint8)
    assert np.array_equal(receiver.read(0), expected(writer.read(0), before, BATCHES[batch]))
    receiver.close_transfer(1)


def test_a_large_batch_lands_exactly_in_several_regions(site: Site) -> None:
    size = 20 * MIB + 77
    receiver, writer = site.host(epoch=1), site.host(epoch=2, receives=False)
    for _ in range(2):
        receiver.add_buffer(size)
        writer.add_buffer(size)
    writer.randomize(0, 1)
    writer.randomize(1, 2)
    receiver.open(1)
    peer = writer.connect(receiver.describe())
    # What lies first here lies second there.
    assert writer.put(peer, 1, [(0, 0, 1, 0, size), (1, 0, 0, 0, size)])[0] is WriteState.DONE
    assert np.array_equal(receiver.read(1), writer.read(0))
    assert np.array_equal(receiver.read(0), writer.read(1))


def test_done_means_placed(site: Site) -> None:
    receiver, writer = site.receiver(), site.writer()
    receiver.open(1)
    peer = writer.connect(receiver.describe())
    for value in range(1, 60):
        writer.fill(0, value)
        length = 40 if value % 2 else MIB
        assert writer.put(peer, 1, [(0, 0, 0, MIB - length, length)])[0] is WriteState.DONE
        assert receiver.read(0)[-1] == value


def test_runs_outside_registered_memory_are_refused(site: Site) -> None:
    receiver, writer = site.receiver(num_bytes=1000), site.writer(num_bytes=2000)
    receiver.open(1)
    peer = writer.connect(receiver.describe())
    for run, message in {
        (0, 1990, 0, 0, 11): "this engine's region 0, which has 2000 bytes",
        (1, 0, 0, 0, 1): "this engine's region 1, which is none of 1",
        (0, -1, 0, 0, 1): "offset -1",
        (0, 0, 0, 990, 11): "the peer's region 0, which has 1000 bytes",
        (0, 0, -1, 0, 1): "the peer's region -1",
        (0, 0, 0, 0, 0): "at least one byte",
        (0, 0, 0, 1 << 62, 1 << 62): "bytes",
        (0, 0, 0, 0, 100, 11, 100, 100): "11 pieces",
        (0, 0, 0, 0, 100, 1 << 61, 100, 100): "pieces",
        (0, 0, 0, 0, 100, 2, 100, 99): "do not overlap",
        (0, 0, 0, 0, 100, 0, 100, 100): "0 pieces",
    }.items():
        good = (0, 0, 0, 0, 1) + (1, 0, 0) * (len(run) == 8)
        with pytest.raises(TransferEngineError, match=message):
            writer.write(peer, 1, [good, run])
    for rows in ([], [(1, 2, 3)], [(0.5, 0, 0, 0, 1)]):
        with pytest.raises(TransferEngineError, match="non-empty array of integers"):
            writer.write(peer, 1, rows)
    for transfer_id in (0, -1, 1 << 64):
        with pytest.raises(TransferEngineError, match="transfer_id"):
            writer.write(peer, transfer_id, [(0, 0, 0, 0, 1)])
    assert receiver.count_other(0, 0) == 0
    assert writer.put(peer, 1, [(0, 1000, 0, 0, 1000)])[0] is WriteState.DONE
    assert receiver.count_other(0, 1) == 0


def test_the_receiver_refuses_memory_that_it_did_not_register(site: Site) -> None:
    """The writer's own check is led astray by a description that promises too much."""
    receiver = site.host(epoch=1)
    receiver.add_buffer(4096)
    receiver.add_buffer(4096)
    writer = site.writer(num_bytes=MIB)
    receiver.open(1)
    honest = receiver.describe()
    grown = honest | {"regions": [MIB, 4096]}
    for runs in ([(0, 0, 0, 0, MIB)], [(0, 0, 0, 4000, 97), (0, 0, 0, 0, 8)]):
        state, error = writer.put(writer.connect(grown), 1, runs)
        assert state in ENDED_BADLY and error
    peer = writer.connect(honest)
    assert writer.put(peer, 1, [(0, 0, 1, 0, 4096)])[0] is WriteState.DONE
    assert receiver.count_other(1, 1) == 0
    # Of the refused batches at most what is inside memory has landed.
    assert not receiver.read(0)[8:4000].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "pigeon"}, "'pigeon'.*disagg.transfer"),
        ({"format": 99}, "format 99"),
        ({"epoch": -1}, "bad epoch"),
        ({"epoch": "1"}, "bad epoch"),
        ({"rank": None}, "bad epoch or rank"),
        ({"regions": [-1]}, "region sizes"),
        ({"regions": 7}, "region sizes"),
        ({"regions": [1 << 62]}, "region sizes"),
        ({"address": 17}, "address"),
        ({"address": None}, "address"),
        ({"address": [1, 2, 3]}, "address"),
    ],
)
def test_a_description_is_checked(
    pair: tuple[Any, Any], change: dict[str, Any], message: str
) -> None:
    receiver, writer = pair
    with pytest.raises(TransferEngineError, match=message):
        writer.connect(receiver.describe() | change)


def test_only_a_receiver_has_an_address(pair: tuple[Any, Any]) -> None:
    with pytest.raises(TransferEngineError, match="receives=False"):
        pair[1].describe()


def test_an_equal_description_gives_the_same_peer(site: Site) -> None:
    receiver, writer = site.receiver(), site.writer()
    receiver.open(1)
    for _ in range(30):
        peer = writer.connect(receiver.describe())
        assert writer.put(peer, 1, [(0, 0, 0, 0, 8)])[0] is WriteState.DONE


def test_a_transfer_that_is_not_open_is_refused(fenced_site: Site) -> None:
    receiver, writer = fenced_site.receiver(), fenced_site.writer()
    receiver.open(1)
    peer = writer.connect(receiver.describe())
    assert writer.put(peer, 2, [(0, 0, 0, 0, MIB)])[0] is WriteState.FAILED
    assert writer.put(peer, 1, [(0, 0, 0, 0, 10)])[0] is WriteState.DONE
    receiver.close_transfer(1)
    state, error = writer.put(peer, 1, [(0, 0, 0, 10, 10)])
    assert (state, "not open" in error) == (WriteState.FAILED, True)
    assert receiver.count_other(0, 0) == 10


def test_nothing_lands_after_a_fence(fenced_site: Site) -> None:
    site, size = fenced_site, 8 * MIB
    receiver = site.receiver(num_bytes=2 * size)
    writer = site.writer(num_bytes=size)
    receiver.open(1)
    receiver.open(2)
    peer = writer.connect(receiver.describe())
    site.hold()
    runs = [(0, 0, 0, 0, size)]
    fenced = [writer.write(peer, 1, runs) for _ in range(6)]
    sibling = writer.write(peer, 2, [(0, 0, 0, size, size)])
    assert receiver.fenced(1) < 10
    receiver.fill(0, 7)
    fenced += [writer.write(peer, 1, runs) for _ in range(2)]
    site.settle()
    states = [writer.wait(handle)[0] for handle in fenced]
    assert states[-2:] == [WriteState.FAILED] * 2
    assert set(states) <= {WriteState.DONE, WriteState.FAILED}
    memory = receiver.read(0)
    assert (memory[:size] == 7).all()
    # The sibling was not touched; its bytes may have been there before the fill.
    assert writer.wait(sibling)[0] is WriteState.DONE
    assert np.isin(memory[size:], (1, 7)).all()
    assert writer.put(peer, 2, [(0, 0, 0, size, size)])[0] is WriteState.DONE
    assert receiver.read(0)[size:].min() == 1


def test_a_fence_of_an_unknown_transfer_is_done(fenced_site: Site) -> None:
    receiver = fenced_site.receiver()
    assert receiver.fence(77) is FenceState.DONE
    assert receiver.fence(77) is FenceState.DONE
    assert receiver.take_broken() == []


@pytest.mark.parametrize("delay_ms", [0, 4, 12])
def test_a_writer_that_is_killed(fenced_site: Site, delay_ms: int) -> None:
    site, size = fenced_site, 16 * MIB
    receiver = site.receiver(num_bytes=size)
    writer = site.writer(num_bytes=size)
    for transfer_id in (1, 2):
        receiver.open(transfer_id)
    description = receiver.describe()
    peer = writer.connect(description)
    writer.put(peer, 1, [(0, 0, 0, 0, size)])
    site.hold()
    for _ in range(4):
        writer.write(peer, 1, [(0, 0, 0, 0, size)])
    time.sleep(delay_ms / 1000)
    site.kill(writer)
    assert receiver.fenced(1) < 10
    receiver.fill(0, 7)
    site.settle()
    time.sleep(0.05)
    assert receiver.count_other(0, 7) == 0
    # Another process goes on where it stopped.
    successor = site.writer(epoch=102, num_bytes=size)
    peer = successor.connect(description)
    assert successor.put(peer, 2, [(0, 0, 0, 0, size)])[0] is WriteState.DONE
    assert receiver.count_other(0, 1) == 0


def test_a_paused_writer_is_fenced(fenced_site: Site) -> None:
    site, size = fenced_site, 16 * MIB
    if site.is_local:
        pytest.skip("a process is paused")
    receiver = site.receiver(num_bytes=size)
    writer = site.writer(num_bytes=size)
    receiver.open(1)
    peer = writer.connect(receiver.describe())
    for _ in range(8):
        last = writer.write(peer, 1, [(0, 0, 0, 0, size)])
    writer.signal(signal.SIGSTOP)
    assert receiver.fenced(1) < 10
    receiver.fill(0, 7)
    writer.signal(signal.SIGCONT)
    writer.wait(last)
    assert receiver.count_other(0, 7) == 0
    # A new transfer is served, over a new link where the old one had to go.
    receiver.open(2)
    peer = writer.connect(receiver.describe())
    assert writer.put(peer, 2, [(0, 0, 0, 0, size)])[0] is WriteState.DONE
    assert receiver.count_other(0, 1) == 0


def test_a_receiver_that_restarts_at_the_same_address(fenced_site: Site) -> None:
    site = fenced_site
    old = site.receiver(epoch=1)
    writer = site.writer()
    old.open(1)
    description = old.describe()
    peer = writer.connect(description)
    assert writer.put(peer, 1, [(0, 0, 0, 0, 8)])[0] is WriteState.DONE
    site.kill(old)
    assert refusal(writer, peer)
    address = {"port": description["address"][1]} if site.engine == "tcp" else {}
    if site.is_local:
        address = {"address": description["address"]}
    new = site.receiver(epoch=2, **address)
    new.open(1)
    # The socket of shared memory has a name of its own in every process: forge that.
    stale = description | {"address": new.describe()["address"]}
    for queued in (writer.connect(stale), peer):
        state, error = writer.put(queued, 1, [(0, 0, 0, 0, 8)])
        assert state in ENDED_BADLY and error
    assert new.count_other(0, 0) == 0
    peer = writer.connect(new.describe())
    assert writer.put(peer, 1, [(0, 0, 0, 0, 8)])[0] is WriteState.DONE


def test_a_receiver_that_is_gone(site: Site) -> None:
    receiver, writer = site.receiver(num_bytes=8 * MIB), site.writer(num_bytes=8 * MIB)
    receiver.open(1)
    description = receiver.describe()
    peer = writer.connect(description)
    assert writer.put(peer, 1, [(0, 0, 0, 0, 8)])[0] is WriteState.DONE
    site.hold()
    handles = [writer.write(peer, 1, [(0, 0, 0, 0, 8 * MIB)]) for _ in range(4)]
    site.kill(receiver)
    site.settle()
    for handle in handles:
        writer.wait(handle)
    for queued in (peer, writer.connect(description)):
        assert refusal(writer, queued)


def test_peers_at_the_same_time(site: Site) -> None:
    size, num_writers = 4 * MIB, 3
    receivers = [site.receiver(epoch=epoch, num_bytes=num_writers * size) for epoch in (1, 2)]
    writers = [site.writer(epoch=10 + n, num_bytes=size) for n in range(num_writers)]
    for receiver in receivers:
        for number in range(num_writers):
            receiver.open(1 + number)
    handles = []
    for number, writer in enumerate(writers):
        writer.fill(0, 10 + number)
        for receiver in receivers:
            peer = writer.connect(receiver.describe())
            for part in range(4):
                offset = part * MIB
                runs = [(0, offset, 0, number * size + offset, MIB)]
                handles.append((writer, writer.write(peer, 1 + number, runs)))
    for writer, handle in reversed(handles):
        assert writer.wait(handle)[0] is WriteState.DONE
    for receiver in receivers:
        memory = receiver.read(0).reshape(num_writers, size)
        for number in range(num_writers):
            assert (memory[number] == 10 + number).all()


def test_handles_are_polled_in_any_order(site: Site) -> None:
    receiver, writer = site.receiver(num_bytes=8 * MIB), site.writer(num_bytes=8 * MIB)
    receiver.open(1)
    receiver.open(2)
    peer = writer.connect(receiver.describe())
    site.hold()
    handles = [
        writer.write(peer, 1 + n % 2, [(0, 0, 0, n * 64, 64 if n % 3 else 4 * MIB)])
        for n in range(60)
    ]
    states = {writer.poll(handle)[0] for handle in handles}
    assert states <= {WriteState.RUNNING, WriteState.DONE}
    if site.is_local:
        for post in reversed(list(site.fabric.posts)):
            site.fabric.land(post)
    for handle in handles[::-1] + handles:
        assert writer.wait(handle) == (WriteState.DONE, "")


def test_what_was_cancelled_ends(site: Site) -> None:
    receiver, writer = site.receiver(num_bytes=8 * MIB), site.writer(num_bytes=8 * MIB)
    receiver.open(1)
    peer = writer.connect(receiver.describe())
    handles = [writer.write(peer, 1, [(0, 0, 0, 0, 8 * MIB)]) for _ in range(12)]
    for handle in handles[1:]:
        writer.cancel(handle)
    assert writer.wait(handles[0])[0] is WriteState.DONE
    states = [writer.wait(handle)[0] for handle in handles[1:]]
    assert set(states) <= {WriteState.DONE, WriteState.FAILED}
    # The link is as good as before.
    assert writer.put(peer, 1, [(0, 0, 0, 0, 8)])[0] is WriteState.DONE


def test_a_writer_that_closes_ends_its_writes(site: Site) -> None:
    receiver, writer = site.receiver(num_bytes=8 * MIB), site.writer(num_bytes=8 * MIB)
    receiver.open(1)
    peer = writer.connect(receiver.describe())
    writer.put(peer, 1, [(0, 0, 0, 0, 8)])
    site.hold()
    handles = [writer.write(peer, 1, [(0, 0, 0, 0, 8 * MIB)]) for _ in range(6)]
    writer.close()
    assert WriteState.RUNNING not in {writer.poll(handle)[0] for handle in handles}
    with pytest.raises(TransferEngineError, match="was closed"):
        writer.write(peer, 1, [(0, 0, 0, 0, 8)])
    with pytest.raises(TransferEngineError, match="was closed"):
        writer.connect(receiver.describe())


def test_nothing_lands_after_a_receiver_has_closed(fenced_site: Site) -> None:
    site = fenced_site
    receiver, writer = site.receiver(num_bytes=8 * MIB), site.writer(num_bytes=8 * MIB)
    receiver.open(1)
    peer = writer.connect(receiver.describe())
    writer.put(peer, 1, [(0, 0, 0, 0, 8)])
    site.hold()
    handles = [writer.write(peer, 1, [(0, 0, 0, 0, 8 * MIB)]) for _ in range(6)]
    receiver.close()
    receiver.fill(0, 7)
    site.settle()
    for handle in handles:
        writer.wait(handle)
    assert receiver.count_other(0, 7) == 0


def test_a_peer_that_was_disconnected_takes_no_more(site: Site) -> None:
    receiver, writer = site.receiver(), site.writer()
    receiver.open(1)
    peer = writer.connect(receiver.describe())
    handle = writer.write(peer, 1, [(0, 0, 0, 0, MIB)])
    writer.disconnect(peer)
    writer.wait(handle)
    assert writer.put(peer, 1, [(0, 0, 0, 0, 8)])[0] is WriteState.FAILED
    peer = writer.connect(receiver.describe())
    assert writer.put(peer, 1, [(0, 0, 0, 0, 8)])[0] is WriteState.DONE


def test_registering_needs_contiguous_memory_and_epochs_have_64_bits(site: Site) -> None:
    if site.is_local:
        import torch

        engine = site.writer().engine
        with pytest.raises(TransferEngineError, match="contiguous"):
            engine.register(torch.zeros(4, 4)[:, 1])
        with pytest.raises(TransferEngineError, match="not empty"):
            engine.register(torch.zeros(0))
    with pytest.raises((TransferEngineError, AssertionError), match="64-bit"):
        site.host(epoch=1 << 64)


@pytest.mark.soak
def test_fences_at_random_moments(fenced_site: Site) -> None:
    """Two writers write without pause; some are paused, some are killed and replaced."""
    site, size = fenced_site, 2 * MIB
    rng = np.random.default_rng(5)
    receiver = site.receiver(num_bytes=2 * size)
    writers = [site.writer(epoch=100 + n, num_bytes=size) for n in range(2)]
    epoch = 200
    for round_number in range(150):
        ids = [2 * round_number + 1 + n for n in range(2)]
        for transfer_id in ids:
            receiver.open(transfer_id)
        peers = [writer.connect(receiver.describe()) for writer in writers]
        handles: list[list[int]] = [[], []]
        for n, writer in enumerate(writers):
            for _ in range(int(rng.integers(1, 12))):
                shape = rng.integers(3)
                if shape == 0:
                    runs = [(0, 0, 0, n * size, size)]
                elif shape == 1:
                    runs = [(0, 0, 0, n * size, 64, size // 128, 128, 128)]
                else:
                    runs = scattered(rng, 1024, 2048, [2048] * 1024)
                    runs = [(a, b, c, n * size + d, length) for a, b, c, d, length in runs]
                handles[n].append(writer.write(peers[n], ids[n], runs))
        victim = int(rng.integers(2))
        what = "none" if site.is_local else rng.choice(["none", "none", "pause", "kill"])
        time.sleep(float(rng.choice([0, 0, 0.001, 0.004])))
        if what == "pause":
            writers[victim].signal(signal.SIGSTOP)
        elif what == "kill":
            site.kill(writers[victim])
        receiver.fenced(ids[victim])
        # The fenced half belongs to somebody else now.
        receiver.fill_part(0, victim * size, size, 7)
        if what == "pause":
            writers[victim].signal(signal.SIGCONT)
        broken = receiver.take_broken()
        other = 1 - victim
        states = [writers[other].wait(handle)[0] for handle in handles[other]]
        if not broken:
            assert set(states) == {WriteState.DONE}
        if what != "kill":
            for handle in handles[victim]:
                writers[victim].wait(handle)
        assert receiver.count_part_other(0, victim * size, size, 7) == 0, (round_number, what)
        assert receiver.fence(ids[other]) is FenceState.DONE
        receiver.fill_part(0, 0, 2 * size, 0)
        if what == "kill":
            epoch += 1
            writers[victim] = site.writer(epoch=epoch, num_bytes=size)
