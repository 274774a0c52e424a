"""A DP rank's sockets: a message ends a wait, and nothing waits longer than it may."""

import threading
import time

import pytest
import zmq

from inferkit.online.instance import Instance, ParentAddress
from inferkit.online.worker_link import WorkerLink

LONG_MS = 20_000


@pytest.fixture
def sockets():
    """A parent's ROUTER and PULL, and a link to them."""
    with zmq.Context() as context:
        router, pull = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        urls = [f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
                for socket in (router, pull)]  # fmt: skip
        parent = ParentAddress(
            instance=Instance.draw("serve"), request_url=urls[0], output_url=urls[1]
        )
        link = WorkerLink(context=context, parent=parent, dp_rank=3)
        link.connect()
        yield router, pull, link
        link.close()
        for socket in (router, pull):
            socket.close(linger=0)


def test_frames_go_both_ways(sockets):
    router, pull, link = sockets
    link.announce(b"here")
    identity, frame = router.recv_multipart()
    assert frame == b"here" and identity.endswith(b"/3")
    for word in (b"one", b"two"):
        router.send_multipart([identity, word])
    frames = []
    while len(frames) < 2:
        frames += link.receive(LONG_MS)
    assert frames == [b"one", b"two"]
    link.send([b"a", b"b"])
    assert pull.recv_multipart() == [b"a", b"b"]


def test_a_message_ends_the_wait(sockets):
    router, _, link = sockets
    link.announce(b"here")
    identity, _ = router.recv_multipart()
    timer = threading.Timer(0.1, router.send_multipart, [[identity, b"now"]])
    start_s = time.monotonic()
    timer.start()
    assert link.receive(LONG_MS) == [b"now"]
    assert time.monotonic() - start_s < LONG_MS / 2000
    timer.join()


def test_without_a_message_the_wait_is_over_in_time(sockets):
    _, _, link = sockets
    start_s = time.monotonic()
    assert link.receive(0) == [] and link.receive(20) == []
    assert 0.015 < time.monotonic() - start_s < 5


def test_sending_never_waits_for_the_parent():
    """A parent that does not read must not stop the loop."""
    with zmq.Context() as context:
        parent = ParentAddress(
            instance=Instance.draw("serve"),
            request_url="tcp://127.0.0.1:1",
            output_url="tcp://127.0.0.1:1",
        )
        link = WorkerLink(context=context, parent=parent, dp_rank=0)
        link.connect()
        start_s = time.monotonic()
        for _ in range(5000):
            link.send([b"x" * 100])
        assert time.monotonic() - start_s < 5
        context.destroy(linger=0)
