"""When a peer counts as lost (reference section 10, item 40)."""

from inferkit.kv_transfer.heartbeat import Heartbeat
from tests.kv_transfer.ranks_alone import Clock


def test_three_misses_in_a_row_lose_a_peer_and_an_answer_brings_it_back() -> None:
    clock = Clock()
    heartbeat = Heartbeat(interval_s=5.0, num_misses=3, clock=clock)
    heartbeat.watch("p")
    assert heartbeat.due() == ["p"]
    assert heartbeat.due() == []
    assert [heartbeat.on_miss("p") for _ in range(2)] == [False, False]
    assert not heartbeat.on_answer("p")
    assert [heartbeat.on_miss("p") for _ in range(4)] == [False, False, True, False]
    clock.now_s += 4.9
    assert heartbeat.due() == []
    clock.now_s += 0.1
    assert heartbeat.due() == ["p"]
    assert heartbeat.on_answer("p")
    assert not heartbeat.on_answer("p")


def test_a_peer_that_nobody_watches_is_not_probed() -> None:
    heartbeat = Heartbeat(interval_s=5.0, num_misses=1, clock=Clock())
    heartbeat.watch("p")
    heartbeat.watch("p")
    heartbeat.forget("p")
    heartbeat.forget("p")
    assert heartbeat.due() == []
    assert not heartbeat.on_miss("p") and not heartbeat.on_answer("p")
