"""The receiver of the shared-memory engine against a writer that is played by the test."""

import gc
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from inferkit.core.protocols import FenceState, WriteState
from inferkit.kv_transfer.engines import memfd, shared_memory
from inferkit.kv_transfer.engines.memfd import SharedBuffer, map_bytes, map_words
from inferkit.kv_transfer.engines.runs import TransferEngineError
from inferkit.kv_transfer.engines.shared_memory import SharedMemoryEngine
from inferkit.kv_transfer.engines.shared_memory_hello import (
    BAD_HELLO,
    HELLO,
    MAGIC,
    MAX_FDS,
    OTHER_EPOCH,
    WELCOME,
)

EPOCH = 0xFEEDFACECAFE0001
SIZE = 1 << 20


class HandWriter:
    """A writer whose every step is the test's: it can stand still in the midst of a copy."""

    def __init__(self, engine: SharedMemoryEngine, hello: bytes) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(20)
        self.sock.connect(b"\0" + engine.describe()["address"][0].encode())
        self.sock.send(hello)
        data, fds, _, _ = socket.recv_fds(self.sock, WELCOME.size, MAX_FDS)
        self.error = WELCOME.unpack(data)[0]
        self.table_fd = -1
        if self.error:
            return
        self.table, self.cells = map_words(fds[0], writable=False), map_words(fds[1], writable=True)
        self.table_fd = fds[0]
        self.memory = map_bytes(fds[2])
        for fd in fds[1:]:
            os.close(fd)

    def close(self) -> None:
        self.sock.close()
        if self.table_fd >= 0:
            os.close(self.table_fd)

    def may_write(self, transfer_id: int) -> bool:
        self.cells[0] = transfer_id
        return bool(self.table[transfer_id % len(self.table)] == transfer_id)

    def end_copy(self) -> None:
        self.cells[0] = 0

    def is_ended(self) -> bool:
        return self.sock.recv(1) == b""


@pytest.fixture
def hand_writer() -> Iterator[Callable[..., HandWriter]]:
    writers = []

    def make(engine: SharedMemoryEngine, hello: bytes = HELLO.pack(MAGIC, EPOCH, 7, 0, 1)):
        writers.append(HandWriter(engine, hello))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()


@pytest.fixture
def engine() -> Iterator[SharedMemoryEngine]:
    engine = SharedMemoryEngine(epoch=EPOCH, num_threads=1)
    engine.register(engine.allocate(SIZE))
    engine.start()
    engine.open_transfer(1)
    engine.open_transfer(2)
    yield engine
    engine.close()


def memory_of(engine: SharedMemoryEngine) -> torch.Tensor:
    return engine.regions[0]


def fence_in_time(engine: SharedMemoryEngine, transfer_id: int, limit_s: float = 20) -> float:
    start = time.monotonic()
    while engine.fence(transfer_id) is FenceState.RUNNING:
        assert time.monotonic() < start + limit_s
        time.sleep(0.001)
    return time.monotonic() - start


def test_a_fence_does_not_wait_for_a_writer_that_copies_another_transfer(
    engine: SharedMemoryEngine,
    hand_writer: Any,
) -> None:
    writer = hand_writer(engine)
    assert writer.may_write(2)
    assert engine.fence(1) is FenceState.DONE
    writer.memory[5] = 9
    writer.end_copy()
    assert memory_of(engine)[5] == 9
    assert not writer.may_write(1)
    # It has announced a copy that it will not make: that looks like one.
    assert engine.fence(1) is FenceState.RUNNING
    writer.end_copy()
    assert engine.fence(1) is FenceState.DONE
    assert engine.take_broken() == []


def test_a_fence_waits_for_the_end_of_a_copy(engine: SharedMemoryEngine, hand_writer: Any) -> None:
    writer = hand_writer(engine)
    assert writer.may_write(1)
    assert engine.fence(1) is FenceState.RUNNING
    writer.memory[5] = 9
    writer.end_copy()
    assert engine.fence(1) is FenceState.DONE
    assert not writer.may_write(1)
    # The sibling of the same writer is not touched.
    assert writer.may_write(2)


def test_the_end_of_the_socket_proves_a_writer_dead(
    engine: SharedMemoryEngine, hand_writer: Any
) -> None:
    writer = hand_writer(engine)
    assert writer.may_write(1)
    assert engine.fence(1) is FenceState.RUNNING
    writer.sock.close()
    assert fence_in_time(engine, 1) < shared_memory.PATIENCE_S
    assert engine.take_broken() == []


def test_memory_is_left_to_a_writer_that_stands_still(
    engine: SharedMemoryEngine, hand_writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "PATIENCE_S", 0.2)
    memory = memory_of(engine)
    address = memory.data_ptr()
    memory.copy_(torch.arange(SIZE) % 251)
    still, healthy = hand_writer(engine), hand_writer(engine)
    assert still.may_write(1) and healthy.may_write(2)
    assert fence_in_time(engine, 1) >= 0.2
    # Same addresses, same bytes; both links are gone, and the sibling is broken.
    assert memory.data_ptr() == address
    assert torch.equal(memory, (torch.arange(SIZE) % 251).to(torch.uint8))
    assert engine.take_broken() == [2]
    assert engine.take_broken() == []
    assert still.is_ended() and healthy.is_ended()
    still.memory[:] = 99
    healthy.memory[:] = 98
    memory[3] = 5
    assert torch.equal(memory[:3], torch.tensor([0, 1, 2], dtype=torch.uint8)) and memory[3] == 5
    assert not healthy.may_write(2)
    assert engine.fence(2) is FenceState.DONE
    # The same description leads to the memory where it is now.
    engine.open_transfer(3)
    successor = hand_writer(engine)
    assert successor.may_write(3)
    successor.memory[7] = 77
    assert memory[7] == 77
    # What the engine itself writes with finds the way, too.
    writer = SharedMemoryEngine(epoch=3, receives=False)
    writer.register(torch.full((8,), 66, dtype=torch.uint8))
    writer.start()
    write = writer.write_batch(writer.connect(engine.describe()), 3, [(0, 0, 0, 100, 8)])
    while writer.poll(write) is WriteState.RUNNING:
        time.sleep(0.001)
    assert writer.poll(write) is WriteState.DONE
    assert memory[100:108].tolist() == [66] * 8
    writer.close()


def test_closing_leaves_memory_to_a_writer_that_stands_still(
    hand_writer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "PATIENCE_S", 0.1)
    engine = SharedMemoryEngine(epoch=EPOCH)
    engine.register(engine.allocate(SIZE))
    engine.start()
    engine.open_transfer(1)
    writer = hand_writer(engine)
    assert writer.may_write(1)
    engine.close()
    writer.memory[:] = 9
    assert not memory_of(engine).any()


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        (HELLO.pack(MAGIC, EPOCH + 1, 7, 0, 1), OTHER_EPOCH),
        (HELLO.pack(b"whatever", EPOCH, 7, 0, 1), BAD_HELLO),
        (HELLO.pack(MAGIC, EPOCH, 7, 0, 100_000), BAD_HELLO),
        (b"x", BAD_HELLO),
        (b"x" * 5000, BAD_HELLO),
    ],
)
def test_memory_is_given_to_writers_of_this_epoch_only(
    engine: SharedMemoryEngine, hand_writer: Any, hello: bytes, error: int
) -> None:
    assert hand_writer(engine, hello).error == error
    assert hand_writer(engine).may_write(1)


def test_more_words_of_a_writer_do_not_end_its_link(
    engine: SharedMemoryEngine, hand_writer: Any
) -> None:
    """Only the end of the socket is a proof: the fence still sees the copy."""
    writer = hand_writer(engine)
    assert writer.may_write(1)
    writer.sock.send(b"hello again")
    time.sleep(0.1)
    assert engine.fence(1) is FenceState.RUNNING
    writer.end_copy()
    assert engine.fence(1) is FenceState.DONE


def test_a_writer_cannot_open_transfers(engine: SharedMemoryEngine, hand_writer: Any) -> None:
    writer = hand_writer(engine)
    with pytest.raises(PermissionError):
        mmap.mmap(writer.table_fd, mmap.PAGESIZE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_gets_no_memory(engine: SharedMemoryEngine) -> None:
    name = engine.describe()["address"][0]
    code = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "sock.settimeout(20)\n"
        f"sock.connect(b'\\0' + {name!r}.encode())\n"
        "sys.exit(0 if sock.recv(1) == b'' else 3)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert result.returncode == 0


def test_memory_that_was_not_allocated_here_is_a_source_only() -> None:
    engine = SharedMemoryEngine(epoch=EPOCH)
    engine.register(torch.zeros(100, dtype=torch.uint8))
    shared = engine.allocate(1000)
    engine.register(shared[200:300].view(torch.float32))
    engine.start()
    description = engine.describe()
    assert description["regions"] == [0, 100]
    assert description["address"][1] == [[-1, 0], [0, 200]]
    writer = SharedMemoryEngine(epoch=3, receives=False)
    writer.register(torch.ones(100, dtype=torch.uint8))
    with pytest.raises(TransferEngineError, match="region 0, which has 0 bytes"):
        writer.write_batch(writer.connect(description), 1, [(0, 0, 0, 0, 1)])
    with pytest.raises(TransferEngineError, match="does not receive"):
        writer.open_transfer(1)
    engine.close()


def test_ids_of_open_transfers_are_near_to_each_other(
    engine: SharedMemoryEngine, hand_writer: Any
) -> None:
    with pytest.raises(TransferEngineError, match=r"transfer 65537 .* beside transfer 1"):
        engine.open_transfer(65537)
    engine.close_transfer(1)
    engine.open_transfer(65537)
    engine.close_transfer(1)  # is over already, and does not end its successor
    assert hand_writer(engine).may_write(65537)


def test_a_system_without_membarrier_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "_MEMBARRIER", {})
    with pytest.raises(TransferEngineError, match="membarrier.*disagg.transfer=tcp"):
        SharedMemoryEngine(epoch=1).start()


def test_replacing_the_file_keeps_bytes_and_holes() -> None:
    step = memfd.REPLACE_BYTES
    buffer = SharedBuffer(2 * step + 12345)
    old = os.dup(buffer.fd)
    rng = np.random.default_rng(0)
    values = {10: 1, step - 1: 2, 2 * step: 3, 2 * step + 12344: 4}
    for position, value in values.items():
        buffer.data[position] = value
    page = rng.integers(0, 256, 5000, dtype=np.uint8)
    buffer.data[step - 2000 : step + 3000] = torch.from_numpy(page)
    buffer.replace_file()
    # Neither file holds what was never written, the old one holds nothing at all.
    assert os.fstat(buffer.fd).st_blocks * 512 <= 8 * mmap.PAGESIZE
    assert os.fstat(old).st_blocks == 0
    assert {p: int(buffer.data[p]) for p in (10, 2 * step, 2 * step + 12344)} == {
        p: values[p] for p in (10, 2 * step, 2 * step + 12344)
    }
    assert np.array_equal(buffer.data[step - 2000 : step + 3000].numpy(), page)
    assert int((buffer.data != 0).sum()) == 3 + np.count_nonzero(page)
    os.pwrite(old, b"late", 10)
    assert int(buffer.data[10]) == 1
    os.close(old)
    buffer.close()


def test_closing_leaves_no_descriptor_and_no_thread() -> None:
    gc.collect()
    before = open_things()
    for _ in range(3):
        receiver = SharedMemoryEngine(epoch=EPOCH)
        receiver.register(receiver.allocate(SIZE))
        receiver.start()
        receiver.open_transfer(1)
        writer = SharedMemoryEngine(epoch=3)
        writer.register(torch.ones(8, dtype=torch.uint8))
        writer.start()
        write = writer.write_batch(writer.connect(receiver.describe()), 1, [(0, 0, 0, 0, 8)])
        while writer.poll(write) is WriteState.RUNNING:
            time.sleep(0.001)
        assert receiver.regions[0][:8].tolist() == [1] * 8
        writer.close()
        receiver.close()
    deadline = time.monotonic() + 20
    while any(now > then for now, then in zip(open_things(), before, strict=True)):
        assert time.monotonic() < deadline, (open_things(), before)
        time.sleep(0.01)


def open_things() -> tuple[int, int]:
    """Descriptors and threads of this process; a thread leaves a moment after it was joined."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_closing_ends_who_has_connected_and_said_nothing() -> None:
    engine = SharedMemoryEngine(epoch=EPOCH)
    engine.register(engine.allocate(SIZE))
    engine.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.settimeout(20)
        silent.connect(b"\0" + engine.describe()["address"][0].encode())
        deadline = time.monotonic() + 20
        while not engine._accepted:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        engine.close()
        assert silent.recv(1) == b""
    assert not engine._accepted
