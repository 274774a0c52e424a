"""What a stranger, a broken writer or a silent receiver can do to the tcp engine."""

import gc
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from inferkit.core.protocols import FenceState, WriteState
from inferkit.kv_transfer.engines.runs import TransferEngineError
from inferkit.kv_transfer.engines.tcp import TcpEngine
from inferkit.kv_transfer.engines.tcp_frames import (
    ANSWER,
    HEADER,
    HELLO,
    MAGIC,
    WELCOME,
    Status,
)
from tests.kv_transfer.engines.hosts import Site

EPOCH = 0xFEEDFACECAFE0001
MIB = 1 << 20


class Receiver:
    """An engine in this process with one region of 4 MiB, and transfers 1 and 2 open."""

    def __init__(self) -> None:
        self.engine = TcpEngine(epoch=EPOCH, num_threads=2)
        self.memory = self.engine.allocate(4 * MIB)
        self.engine.register(self.memory)
        self.engine.start()
        for transfer_id in (1, 2):
            self.engine.open_transfer(transfer_id)
        self.sockets: list[socket.socket] = []

    def connect(self, *, epoch: int = EPOCH) -> socket.socket:
        """A connection that has said hello."""
        sock = socket.create_connection((self.engine.host, self.engine.port), timeout=20)
        self.sockets.append(sock)
        sock.sendall(HELLO.pack(MAGIC, epoch, 7, 0))
        return sock

    def link(self) -> socket.socket:
        sock = self.connect()
        assert WELCOME.unpack(receive(sock, WELCOME.size)) == (MAGIC, Status.OK)
        return sock

    def still_serves(self) -> bool:
        sock = self.link()
        sock.sendall(frame([(0, 0, 3, 1, 0)]) + b"abc")
        return answer(sock) == Status.OK and bytes(self.memory[:3].tolist()) == b"abc"

    def close(self) -> None:
        self.engine.close()
        for sock in self.sockets:
            sock.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site("tcp")
    yield site
    site.close()


def frame(
    rows: Any, *, transfer_id: int = 1, epoch: int = EPOCH, size: int | None = None, num: int = 0
) -> bytes:
    """A frame's header and table; `rows` are (region, offset, num_bytes, num_pieces, stride)."""
    table = np.array(rows, "<i8")
    num_bytes = int((table[:, 2] * table[:, 3]).sum()) if size is None else size
    header = HEADER.pack(epoch, transfer_id, 99, num_bytes, num or len(table))
    return header + table.tobytes()


def answer(sock: socket.socket) -> int:
    batch_id, status = ANSWER.unpack(receive(sock, ANSWER.size))
    assert batch_id == 99
    return int(status)


def is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1)
    except ConnectionError:
        return True


def until_read(receiver: Receiver, offset: int) -> None:
    """Wait until the receiver has placed the byte at `offset`."""
    deadline = time.monotonic() + 20
    while not receiver.memory[offset]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_stalled_frame_does_not_hold_a_fence_up(receiver: Receiver) -> None:
    sock = receiver.link()
    # The receiver wakes for pieces of LOW_WATER_BYTES: more than one of them is there.
    sock.sendall(frame([(0, 0, 3 * MIB, 1, 0)]) + b"x" * (2 * MIB))
    until_read(receiver, MIB)
    assert receiver.engine.fence(1) is FenceState.DONE
    receiver.memory.fill_(7)
    # The rest comes late; so does a whole frame, and one for another transfer.
    sock.sendall(b"x" * MIB)
    assert answer(sock) == Status.NOT_OPEN
    sock.sendall(frame([(0, 0, 100, 1, 0)]) + b"x" * 100)
    assert answer(sock) == Status.NOT_OPEN
    assert (receiver.memory == 7).all()
    sock.sendall(frame([(0, 9, 1, 1, 0)], transfer_id=2) + b"x")
    assert answer(sock) == Status.OK
    assert receiver.memory[9] == ord("x") and (receiver.memory != 7).sum() == 1


def test_small_runs_of_a_fenced_frame_do_not_land_either(receiver: Receiver) -> None:
    sock = receiver.link()
    rows = [(0, 1000 * i, 64, 1, 0) for i in range(100)]
    sock.sendall(frame(rows) + b"x" * 3200)
    assert receiver.engine.fence(1) is FenceState.DONE
    sock.sendall(b"x" * 3200)
    assert answer(sock) == Status.NOT_OPEN
    assert not receiver.memory.any()


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 4 * MIB - 5, 6, 1, 0)],
        [(0, 0, 10, 1, 0), (1, 0, 10, 1, 0)],
        [(0, -1, 10, 1, 0)],
        [(0, 0, 10, 3, 9)],
        [(0, 0, MIB, 5, MIB)],
    ],
)
def test_a_frame_outside_memory_is_refused_and_those_behind_it_are_not(
    receiver: Receiver, rows: Any
) -> None:
    sock = receiver.link()
    head = frame(rows)
    sock.sendall(head + b"x" * HEADER.unpack(head[: HEADER.size])[3])
    assert answer(sock) == Status.OUT_OF_BOUNDS
    assert not receiver.memory.any()
    sock.sendall(frame([(0, 0, 2, 1, 0)]) + b"ok")
    assert answer(sock) == Status.OK


@pytest.mark.parametrize(
    "data",
    [
        frame([(0, 0, 10, 1, 0)], epoch=EPOCH + 1),
        frame([(0, 0, 10, 1, 0)], size=11) + b"x" * 11,
        frame([(0, 0, 10, 1, 0)], size=1 << 40),
        frame([(0, 0, 10, 1, 0)], size=0),
        frame([(0, 0, 10, 1, 0)], num=1 << 20),
        b"\xff" * 4096,
    ],
)
def test_a_connection_that_is_out_of_step_is_closed(receiver: Receiver, data: bytes) -> None:
    sock = receiver.link()
    sock.sendall(data)
    assert is_closed(sock)
    assert not receiver.memory.any()
    assert receiver.still_serves()


def test_a_writer_of_another_epoch_is_told_so(receiver: Receiver) -> None:
    sock = receiver.connect(epoch=EPOCH + 1)
    assert WELCOME.unpack(receive(sock, WELCOME.size)) == (MAGIC, Status.OTHER_EPOCH)
    assert is_closed(sock)


def test_strangers_do_no_harm(receiver: Receiver) -> None:
    rng = np.random.default_rng(0)
    address = (receiver.engine.host, receiver.engine.port)
    for length in (0, 1, 31, 32, 33, 5000):
        with socket.create_connection(address, timeout=20) as sock:
            sock.sendall(rng.bytes(length))
            if length >= HELLO.size:
                assert is_closed(sock)
    for length in (1, 39, 40, 300, 5000):
        sock = receiver.link()
        sock.sendall(rng.bytes(length))
        sock.close()
    for _ in range(3):
        sock = receiver.link()
        sock.sendall(frame([(0, 0, 100, 1, 0)]) + b"x" * 10)
        # Reset instead of an orderly end.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
    assert receiver.still_serves()


def test_a_receiver_that_falls_silent_costs_the_writer_nothing_but_time(site: Site) -> None:
    target = site.receiver(num_bytes=64 * MIB)
    target.open(1)
    engine = TcpEngine(epoch=3, receives=False, write_timeout_s=2.0, num_connections=1)
    source = torch.ones(64 * MIB, dtype=torch.uint8)
    engine.register(source)
    engine.start()
    peer = engine.connect(target.describe())
    first = engine.write_batch(peer, 1, [(0, 0, 0, 0, 8)])
    wait_for(engine, first)
    target.signal(signal.SIGSTOP)
    start = time.monotonic()
    begun = engine.write_batch(peer, 1, [(0, 0, 0, 0, 64 * MIB)])
    queued = engine.write_batch(peer, 1, [(0, 0, 0, 0, 8)])
    assert time.monotonic() - start < 1.8, "posting waited for the receiver"
    assert engine.poll(begun) is WriteState.RUNNING
    wait_for(engine, begun, queued)
    assert time.monotonic() - start >= 1.8
    # Bytes of the first are in the sockets and will land; of the second there are none.
    assert (engine.poll(begun), engine.poll(queued)) == (WriteState.LOST, WriteState.FAILED)
    assert "does not answer" in begun.error
    target.signal(signal.SIGCONT)
    # The same description makes a new connection.
    again = engine.write_batch(engine.connect(target.describe()), 1, [(0, 0, 0, 0, 8)])
    wait_for(engine, again)
    assert engine.poll(again) is WriteState.DONE
    engine.close()


def test_nobody_at_the_address_is_an_error_of_the_write(site: Site) -> None:
    target = site.receiver()
    description = target.describe()
    site.kill(target)
    engine = TcpEngine(epoch=3, receives=False)
    engine.register(torch.ones(8, dtype=torch.uint8))
    engine.start()
    write = engine.write_batch(engine.connect(description), 1, [(0, 0, 0, 0, 8)])
    wait_for(engine, write)
    assert engine.poll(write) is WriteState.FAILED
    assert f":{description['address'][1]}: " in write.error and "refused" in write.error
    engine.close()


def test_a_failure_of_a_thread_reaches_the_caller(receiver: Receiver) -> None:
    """A callback raises what nobody foresaw."""
    receiver.engine._io[0].call(lambda: 1 // 0)
    deadline = time.monotonic() + 20
    with pytest.raises(TransferEngineError, match="ZeroDivisionError"):
        while time.monotonic() < deadline:
            receiver.engine.connect(receiver.engine.describe())
            time.sleep(0.01)


def test_a_process_without_descriptors_serves_again_later(
    receiver: Receiver,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    sock = socket.socket()
    receiver.sockets.append(sock)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        sock.connect((receiver.engine.host, receiver.engine.port))
        time.sleep(0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    sock.settimeout(20)
    sock.sendall(HELLO.pack(MAGIC, EPOCH, 7, 0))
    assert WELCOME.unpack(receive(sock, WELCOME.size)) == (MAGIC, Status.OK)


def test_an_address_comes_with_start() -> None:
    engine = TcpEngine(epoch=1)
    with pytest.raises(TransferEngineError, match="before start"):
        engine.describe()


def test_closing_leaves_no_descriptor_and_no_thread() -> None:
    gc.collect()
    before = open_things()
    for _ in range(3):
        receiver = Receiver()
        assert receiver.still_serves()
        writer = TcpEngine(epoch=3)
        writer.register(torch.ones(8, dtype=torch.uint8))
        writer.start()
        write = writer.write_batch(writer.connect(receiver.engine.describe()), 1, [(0, 0, 0, 0, 8)])
        wait_for(writer, write)
        writer.close()
        receiver.close()
    deadline = time.monotonic() + 20
    while any(now > then for now, then in zip(open_things(), before, strict=True)):
        assert time.monotonic() < deadline, (open_things(), before)
        time.sleep(0.01)


def open_things() -> tuple[int, int]:
    """Descriptors and threads of this process; a thread leaves a moment after it was joined."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"num_connections": 0}, "num_connections=0"), ({"num_threads": 0}, "num_threads=0")],
)
def test_an_engine_checks_its_parameters(kwargs: dict[str, int], message: str) -> None:
    with pytest.raises(TransferEngineError, match=message):
        TcpEngine(epoch=1, **kwargs)


def wait_for(engine: TcpEngine, *writes: Any) -> None:
    deadline = time.monotonic() + 60
    while WriteState.RUNNING in {engine.poll(write) for write in writes}:
        assert time.monotonic() < deadline
        time.sleep(0.001)
