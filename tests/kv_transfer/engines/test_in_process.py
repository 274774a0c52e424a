from collections.abc import Iterator

import pytest

from inferkit.core.protocols import FenceState, WriteState
from inferkit.kv_transfer.engines.in_process import Fabric, InProcessEngine


class Pair:
    """A receiver with zeros and a writer with ones, linked; new posts are held."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.receiver = self.engine(1)
        self.writer = self.engine(2)
        self.target = self.receiver.allocate(100)
        self.receiver.register(self.target)
        self.source = self.writer.allocate(100).fill_(1)
        self.writer.register(self.source)
        self.receiver.open_transfer(5)
        self.peer = self.writer.connect(self.receiver.describe())
        self.fabric.is_held = True

    def engine(self, epoch: int, address: str = "") -> InProcessEngine:
        engine = InProcessEngine(fabric=self.fabric, epoch=epoch, address=address)
        engine.start()
        return engine

    def post(self, *starts: int, transfer_id: int = 5) -> "object":
        runs = [(0, start, 0, start, 10) for start in starts or (0,)]
        return self.writer.write_batch(self.peer, transfer_id, runs)

    def landed(self) -> list[int]:
        return self.target.nonzero().flatten().tolist()


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield Pair()


def test_posts_land_when_and_as_far_as_the_test_says(pair: Pair) -> None:
    first, second = pair.post(0, 50), pair.post(20)
    late, early = pair.fabric.posts
    assert pair.landed() == []
    pair.fabric.land(early)
    pair.fabric.land(late, 1)
    assert pair.landed() == [*range(10), *range(20, 30)]
    assert pair.writer.poll(first) is WriteState.RUNNING
    assert pair.writer.poll(second) is WriteState.DONE
    pair.fabric.land(late)
    assert pair.writer.poll(first) is WriteState.DONE
    assert pair.landed() == [*range(10), *range(20, 30), *range(50, 60)]
    assert pair.fabric.posts == []


def test_a_source_is_read_when_the_post_lands(pair: Pair) -> None:
    pair.post()
    pair.source.fill_(3)
    pair.fabric.land_all()
    assert pair.target[0] == 3


def test_what_a_dead_writer_posted_lands_with_its_last_bytes(pair: Pair) -> None:
    handle = pair.post()
    pair.fabric.remove(pair.writer)
    pair.source.fill_(3)
    assert pair.writer.poll(handle) is WriteState.LOST
    pair.fabric.land_all()
    assert pair.target[0] == 1
    assert pair.writer.poll(handle) is WriteState.LOST


def test_a_post_that_was_lost_may_land_and_one_that_was_dropped_does_not(pair: Pair) -> None:
    lost, dropped = pair.post(0), pair.post(20)
    first, second = pair.fabric.posts
    pair.fabric.lose(first)
    pair.fabric.drop(second)
    assert pair.writer.poll(lost) is WriteState.LOST
    assert pair.writer.poll(dropped) is WriteState.FAILED
    pair.fabric.land_all()
    assert pair.landed() == [*range(10)]


def test_a_fence_refuses_what_is_in_flight_even_half_landed(pair: Pair) -> None:
    handle = pair.post(0, 20, 40)
    pair.fabric.land(pair.fabric.posts[0], 1)
    assert pair.receiver.fence(5) is FenceState.DONE
    pair.fabric.land_all()
    assert pair.landed() == [*range(10)]
    assert pair.writer.poll(handle) is WriteState.FAILED
    assert "not open" in handle.error


def test_a_slow_fence_refuses_before_it_is_done(pair: Pair) -> None:
    pair.post()
    pair.receiver.fence_answer = FenceState.RUNNING
    assert pair.receiver.fence(5) is FenceState.RUNNING
    pair.fabric.land_all()
    assert pair.landed() == []
    pair.receiver.fence_answer = FenceState.DONE
    assert pair.receiver.fence(5) is FenceState.DONE


def test_an_engine_without_fence_lets_writes_land(pair: Pair) -> None:
    pair.post()
    pair.receiver.fence_answer = FenceState.UNABLE
    assert pair.receiver.fence(5) is FenceState.UNABLE
    pair.fabric.land_all()
    assert pair.landed() == [*range(10)]


def test_a_post_for_a_former_process_at_the_address_is_refused(pair: Pair) -> None:
    handle = pair.post()
    pair.fabric.remove(pair.receiver)
    successor = pair.engine(3, address=pair.receiver.address)
    memory = successor.allocate(100)
    successor.register(memory)
    successor.open_transfer(5)
    pair.fabric.land_all()
    assert pair.writer.poll(handle) is WriteState.FAILED and "epoch 1" in handle.error
    assert not memory.any()
