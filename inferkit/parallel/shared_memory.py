"""Collectives between processes of one host, through memory that they share.

gloo wakes two threads per hop of a ring; with more ranks than cores one small all-reduce takes
milliseconds. Here every rank writes its part once and reads those of the others, and waiting
is done by POSIX semaphores that live in the same memory. Sums are taken in rank order, so that
all ranks get equal bits.

    memory = [semaphores: one per rank][parity 0: one slot per rank][parity 1: likewise]

A call uses the slots of its parity and passes one barrier between writing and reading. A rank
can be one call ahead of another, never two, so two parities are enough.
"""

import ctypes
import errno
import mmap
import os
from typing import Any

import torch

from inferkit.core.errors import InferkitError

SLOT_BYTES = 1 << 20
"""Longer tensors take several rounds."""
SEMAPHORE_BYTES = 64
"""sizeof(sem_t) is 32; each on a cache line of its own."""
DIRECT_BYTES = 32 << 10
"""Up to here every rank sums all slots itself; beyond, each rank sums a part for all."""


class SharedMemory:
    """The memory of one group of ranks. `handle` of the first rank goes to `open_shared`."""

    def __init__(self, fd: int, *, rank: int, size: int) -> None:
        self.fd = fd
        self.rank = rank
        self.size = size
        self.parity = 0
        self.memory = mmap.mmap(fd, num_bytes(size))
        data = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.slots = data[size * SEMAPHORE_BYTES :].view(2, size, SLOT_BYTES)
        base = data.data_ptr()
        self._semaphores = [
            ctypes.c_void_p(base + index * SEMAPHORE_BYTES) for index in range(size)
        ]

    def barrier(self) -> None:
        """Return when every rank has entered; what they wrote before is visible after."""
        if self.rank:
            _post(self._semaphores[0])
            _wait(self._semaphores[self.rank])
            return
        for _ in range(self.size - 1):
            _wait(self._semaphores[0])
        for semaphore in self._semaphores[1:]:
            _post(semaphore)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Contiguous x [n] of every rank -> [size, n]."""
        out = x.new_empty((self.size, len(x)))
        step = SLOT_BYTES // x.element_size()
        for start in range(0, len(x), step):
            part = x[start : start + step]
            slots = self._exchange(part.view(torch.uint8))
            out[:, start : start + len(part)] = slots.view(x.dtype)
        return out

    def all_reduce(self, x: torch.Tensor, op: str) -> None:
        """Contiguous x [n], reduced in place ("sum", "min" or "max")."""
        step = SLOT_BYTES // x.element_size()
        for start in range(0, len(x), step):
            part = x[start : start + step]
            slots = self._exchange(part.view(torch.uint8)).view(x.dtype)
            if part.nbytes <= DIRECT_BYTES:
                part.copy_(_reduce(slots, op))
                continue
            share = -(-len(part) // self.size)
            mine = slice(self.rank * share, (self.rank + 1) * share)
            # Only this rank reads these columns of its slot before the barrier.
            slots[self.rank, mine] = _reduce(slots[:, mine], op)
            self.barrier()
            for rank in range(self.size):
                theirs = slice(rank * share, (rank + 1) * share)
                part[theirs] = slots[rank, theirs]

    def all_to_all(
        self, x: torch.Tensor, send_counts: list[int], recv_counts: list[int]
    ) -> torch.Tensor:
        """Contiguous rows [n, ...], those for rank 0 first -> the rows meant for this rank."""
        counts = self.all_gather(torch.tensor(send_counts)).tolist()
        out = x.new_empty((sum(recv_counts), *x.shape[1:]))
        received = out.view(len(out), -1) if len(out) else out
        row_len = x.shape[1:].numel()
        step = SLOT_BYTES // (row_len * x.element_size())
        assert step, f"a row of {row_len} {x.dtype} does not fit into a slot of {SLOT_BYTES} bytes"
        for start in range(0, max(map(sum, counts)), step):
            slots = self._next_slots().view(x.dtype)
            part = x[start : start + step].view(-1)
            slots[self.rank, : len(part)] = part
            self.barrier()
            target = 0
            for rank, sent in enumerate(counts):
                # Rows of `rank` for this one are [first, end) of what it sends.
                first = sum(sent[: self.rank])
                end = first + sent[self.rank]
                low, high = max(first, start), min(end, start + step)
                if low < high:
                    rows = slots[rank, (low - start) * row_len : (high - start) * row_len]
                    place = target + low - first
                    received[place : place + high - low] = rows.view(high - low, row_len)
                target += end - first
        return out

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """Contiguous x [n] of rank `source`, into x of the others."""
        data = x.view(torch.uint8)
        for start in range(0, len(data), SLOT_BYTES):
            part = data[start : start + SLOT_BYTES]
            slot = self._next_slots()[source]
            if self.rank == source:
                slot[: len(part)] = part
            self.barrier()
            if self.rank != source:
                part.copy_(slot[: len(part)])

    def close(self) -> None:
        """Unmap; the memory goes when the last rank has left it."""
        del self.slots
        os.close(self.fd)

    def _exchange(self, part: torch.Tensor) -> torch.Tensor:
        """Write this rank's bytes; returns those of all ranks [size, n], valid in this round."""
        slots = self._next_slots()[:, : len(part)]
        slots[self.rank] = part
        self.barrier()
        return slots

    def _next_slots(self) -> torch.Tensor:
        self.parity ^= 1
        return self.slots[self.parity]


def num_bytes(size: int) -> int:
    return size * (SEMAPHORE_BYTES + 2 * SLOT_BYTES)


def create_shared(size: int) -> tuple[SharedMemory, str]:
    """The memory of a group, made by its first rank, and the handle for `open_shared`.

    Raises:
        OSError: the system has no anonymous files or no memory.
    """
    fd = os.memfd_create("inferkit-collectives")
    os.ftruncate(fd, num_bytes(size))
    shared = SharedMemory(fd, rank=0, size=size)
    for semaphore in shared._semaphores:
        if _libc().sem_init(semaphore, 1, 0):
            raise OSError(ctypes.get_errno(), "sem_init failed")
    return shared, f"/proc/{os.getpid()}/fd/{fd}"


def open_shared(handle: str, *, rank: int, size: int) -> SharedMemory:
    """The memory that the first rank of the group made.

    Raises:
        OSError: it cannot be reached from this process.
    """
    return SharedMemory(os.open(handle, os.O_RDWR), rank=rank, size=size)


def _reduce(slots: torch.Tensor, op: str) -> torch.Tensor:
    if op == "sum":
        return slots.sum(0)
    return slots.amin(0) if op == "min" else slots.amax(0)


_LIBC: list[Any] = []


def _libc() -> Any:
    if not _LIBC:
        _LIBC.append(ctypes.CDLL(None, use_errno=True))
    return _LIBC[0]


def _post(semaphore: ctypes.c_void_p) -> None:
    if _libc().sem_post(semaphore):
        raise InferkitError(f"sem_post failed: {os.strerror(ctypes.get_errno())}")


def _wait(semaphore: ctypes.c_void_p) -> None:
    # A signal interrupts the wait, so that Python can handle it; then the wait goes on.
    while _libc().sem_wait(semaphore):
        if ctypes.get_errno() != errno.EINTR:
            raise InferkitError(f"sem_wait failed: {os.strerror(ctypes.get_errno())}")
