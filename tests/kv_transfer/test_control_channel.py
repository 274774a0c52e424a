import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq

from inferkit.core.errors import ConfigError
from inferkit.kv_transfer import control_channel
from inferkit.kv_transfer.control_channel import MAX_QUEUED, ControlChannel
from inferkit.kv_transfer.signature import FrameSeal

DEADLINE_S = 30.0
MakeChannel = Callable[..., ControlChannel]


@pytest.fixture
def make_channel() -> Iterator[MakeChannel]:
    with ExitStack() as stack:

        def make(host: str = "127.0.0.1", secret: bytes = b"") -> ControlChannel:
            channel = ControlChannel(host=host, secret=secret)
            stack.callback(channel.close)
            channel.start()
            return channel

        yield make


def receive(receiver: ControlChannel, num_frames: int, *senders: ControlChannel) -> list[bytes]:
    """So many frames; what senders have posted is sent meanwhile."""
    frames: list[bytes] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(frames) < num_frames:
        assert time.monotonic() < deadline, f"only {frames} came; {receiver.num_dropped} dropped"
        for sender in senders:
            sender.receive(0)
        frames += receiver.receive(0.01)
    return frames


@pytest.mark.parametrize("secret", [b"", b"shared"])
def test_frames_arrive_in_order(make_channel: MakeChannel, secret: bytes) -> None:
    one, other = make_channel(secret=secret), make_channel(secret=secret)
    frames = [b"", b"x", bytes(100_000)] + [b"%d" % idx for idx in range(500)]
    for frame in frames:
        one.post(other.address, frame)
    assert receive(other, len(frames), one) == frames
    other.post(one.address, b"back")
    assert receive(one, 1, other) == [b"back"]
    assert not one.num_dropped and not other.num_dropped


def test_a_frame_of_someone_else_is_dropped(make_channel: MakeChannel) -> None:
    channel, friend = make_channel(secret=b"ours"), make_channel(secret=b"ours")
    stranger, naive = make_channel(secret=b"theirs"), make_channel()
    stranger.post(channel.address, b"hello")
    naive.post(channel.address, b"hello" * 20)
    naive.post(channel.address, b"")
    friend.post(channel.address, b"hello")
    assert receive(channel, 1, stranger, naive, friend) == [b"hello"]
    deadline = time.monotonic() + DEADLINE_S
    while channel.num_dropped != {"not_authentic": 3}:
        assert time.monotonic() < deadline, channel.num_dropped
        assert channel.receive(0.01) == []


def test_a_changed_frame_is_not_authentic(make_channel: MakeChannel) -> None:
    channel = make_channel(secret=b"ours")
    sealed = channel.seal.seal(b"hello")
    assert channel._opened([sealed]) == b"hello"
    for position in (0, FrameSeal.MAC_BYTES, len(sealed) - 1):
        changed = bytearray(sealed)
        changed[position] ^= 1
        assert channel._opened([bytes(changed)]) is None
    assert channel.num_dropped == {"not_authentic": 3}


def test_frames_of_several_parts_are_dropped(make_channel: MakeChannel) -> None:
    channel = make_channel()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(channel.address)
        socket.send_multipart([b"a", b"b"])
        socket.send(b"c")
        assert receive(channel, 1) == [b"c"]
    assert channel.num_dropped == {"malformed": 1}


def test_only_plain_tcp_addresses_are_followed(make_channel: MakeChannel) -> None:
    channel = make_channel()
    bad = (
        "",
        "ipc:///tmp/inferkit-test",
        "inproc://x",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:80/x",
        "tcp://a;b:80",
        "pgm://127.0.0.1:80",
    )
    for address in bad:
        channel.post(address, b"x")
    channel.receive(0)
    assert channel.num_dropped == {"bad_address": len(bad)}


def test_nothing_waits_for_a_peer_that_is_gone(make_channel: MakeChannel) -> None:
    channel, gone = make_channel(), make_channel()
    address = gone.address
    gone.close()
    start = time.monotonic()
    for _ in range(3 * MAX_QUEUED):
        channel.post(address, b"x" * 100)
    channel.receive(0)
    assert channel.num_dropped["outbox_full"] == 2 * MAX_QUEUED
    for _ in range(MAX_QUEUED):
        channel.post(address, b"x" * 100)
    channel.receive(0)
    assert channel.num_dropped["peer_queue_full"] >= MAX_QUEUED - 1
    channel.close()
    channel.post(address, b"x")
    assert channel.num_dropped["closed"] == 1
    assert time.monotonic() < start + DEADLINE_S


def test_sockets_of_idle_peers_are_closed(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel()
    peers = [make_channel() for _ in range(4)]

    def send_to(*receivers: ControlChannel) -> int:
        for peer in receivers:
            channel.post(peer.address, b"x")
            channel.receive(0)
            assert receive(peer, 1, channel) == [b"x"]
        return len(channel._peers)

    assert send_to(*peers[:3]) == 3
    monkeypatch.setattr(control_channel, "MAX_PEERS", 2)
    assert send_to(peers[3]) == 2
    assert peers[2].address in channel._peers
    monkeypatch.setattr(control_channel, "IDLE_S", 0.0)
    assert send_to(peers[0]) == 0


def test_a_post_of_another_thread_leaves_at_once(make_channel: MakeChannel) -> None:
    one, other = make_channel(), make_channel()
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            one.receive(DEADLINE_S)

    thread = threading.Thread(target=run)
    thread.start()
    start = time.monotonic()
    one.post(other.address, b"x")
    assert receive(other, 1) == [b"x"]
    stop.set()
    one.wake()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert time.monotonic() < start + DEADLINE_S / 2


def test_off_loopback_a_secret_is_needed() -> None:
    with pytest.raises(ConfigError, match="10.0.0.1 come from other hosts.*disagg.secret_env"):
        ControlChannel(host="10.0.0.1")
    for host in ("127.0.0.1", "127.5.5.5", "::1", "localhost"):
        ControlChannel(host=host)
    ControlChannel(host="10.0.0.1", secret=b"x")


def test_a_host_that_is_not_this_machines_cannot_be_bound() -> None:
    channel = ControlChannel(host="203.0.113.7", secret=b"x")
    with pytest.raises(zmq.ZMQError):
        channel.start()
    channel.close()
    channel.close()


def test_ipv6_addresses_are_bracketed(make_channel: MakeChannel) -> None:
    try:
        one, other = make_channel("::1"), make_channel("::1")
    except zmq.ZMQError:
        pytest.skip("this machine has no IPv6")
    assert other.address == f"tcp://[::1]:{other.port}"
    one.post(other.address, b"x")
    assert receive(other, 1, one) == [b"x"]
