"""Memory that processes of one host share through an anonymous file. Knows no engine."""

import ctypes
import mmap
import os
import platform
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from inferkit.kv_transfer.engines.copies import Bytes
from inferkit.kv_transfer.engines.runs import TransferEngineError

Words = npt.NDArray[np.uint64]

REPLACE_BYTES = 16 << 20
"""Step in which memory moves to another file: so much is there twice."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_MAP_FIXED = 0x10
_POPULATE = 23
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
"""Number of the system call; libc has no function for it."""
_GLOBAL_EXPEDITED = 2
_REGISTER_GLOBAL_EXPEDITED = 4


class SharedBuffer:
    """Zeroed memory [num_bytes] that others may map through `fd`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.fd = _make_file(num_bytes)
        self.data = torch.from_numpy(map_bytes(self.fd)[:num_bytes])
        self.address = self.data.data_ptr()

    def replace_file(self) -> None:
        """Put a file of its own under the same addresses, with the same content.

        Who has mapped the old file goes on writing there, and nobody reads it. This process must
        not write to the memory meanwhile.

        Raises:
            OSError: there is no memory for the copy. Addresses and content are as they were, but
                a part of them is in either file.
        """
        old, new = self.fd, _make_file(self.num_bytes)
        file_bytes = os.fstat(old).st_size
        for start in range(0, file_bytes, REPLACE_BYTES):
            end = min(start + REPLACE_BYTES, file_bytes)
            _copy_data(old, new, start, end)
            _map_over(self.address + start, end - start, new, start)
            _punch_hole(old, start, end - start)
        os.close(old)
        self.fd = new

    def close(self) -> None:
        """Others keep what they have mapped; the tensor stays valid as long as it is referenced."""
        os.close(self.fd)


class SharedWords:
    """[n] uint64 that others may map, read-only where they only look."""

    def __init__(self, num_words: int) -> None:
        self.fd = _make_file(8 * num_words)
        self.words = map_words(self.fd, writable=True)

    def open_read_only(self) -> int:
        """A descriptor of the same memory that cannot be mapped for writing."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.fd)


def map_words(fd: int, *, writable: bool) -> Words:
    return np.frombuffer(_map(fd, writable=writable), dtype=np.uint64)


def map_bytes(fd: int) -> Bytes:
    return np.frombuffer(_map(fd, writable=True), dtype=np.uint8)


def _map(fd: int, *, writable: bool) -> mmap.mmap:
    """The whole file. Unlike Python's own mapping it does not keep the file open."""
    num_bytes = os.fstat(fd).st_size
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    memory = mmap.mmap(-1, num_bytes, access=access)
    address = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
    _map_over(address, num_bytes, fd, 0, writable=writable)
    return memory


def touch(data: Bytes, fd: int) -> None:
    """Make the pages that the file holds present in this mapping of it, at once.

    Otherwise each page costs an interrupt when it is first written. Holes stay holes. Where the
    system cannot do it (Linux 5.14) nothing happens.
    """
    address = data.__array_interface__["data"][0]
    for start, end in _data_ranges(fd, 0, len(data)):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        _LIBC.madvise(ctypes.c_void_p(address + first), ctypes.c_size_t(end - first), _POPULATE)


def membarrier() -> None:
    """Every thread of every process that has registered passes a full memory barrier.

    What such a thread did before is visible here afterwards, and what it does next sees what was
    done here before.
    """
    _membarrier(_GLOBAL_EXPEDITED)


def register_for_membarrier() -> None:
    """Let the barriers of other processes act on this one; raises TransferEngineError."""
    _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def _membarrier(command: int) -> None:
    number = _MEMBARRIER.get(platform.machine())
    if number is None or _LIBC.syscall(number, command, 0, 0):
        why = "unknown machine" if number is None else os.strerror(ctypes.get_errno())
        raise TransferEngineError(
            f"shared memory needs the system call membarrier (Linux 4.16): {why}; "
            "choose disagg/transfer=tcp"
        )


def _make_file(num_bytes: int) -> int:
    """Of whole pages: a hole takes whole pages away."""
    fd = os.memfd_create("inferkit-transfer")
    os.ftruncate(fd, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    return fd


def _copy_data(source: int, target: int, start: int, end: int) -> None:
    """Copy [start, end); what was never written stays a hole, which costs no memory."""
    for position, data_end in _data_ranges(source, start, end):
        while position < data_end:
            position += os.copy_file_range(source, target, data_end - position, position, position)


def _data_ranges(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of [start, end) that have been written."""
    position = start
    while position < end:
        try:
            position = os.lseek(fd, position, os.SEEK_DATA)
        except OSError:  # ENXIO: no data behind this position
            return
        data_end = min(os.lseek(fd, position, os.SEEK_HOLE), end)
        if position < data_end:
            yield position, data_end
        position = data_end


def _map_over(address: int, num_bytes: int, fd: int, offset: int, *, writable: bool = True) -> None:
    """Replace the pages at `address` by those of a file, at once."""
    mmap_call = _LIBC.mmap
    mmap_call.restype = ctypes.c_void_p
    mmap_call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if mmap_call(address, num_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) != address:
        raise OSError(ctypes.get_errno(), "shared memory cannot be mapped")


def _punch_hole(fd: int, offset: int, num_bytes: int) -> None:
    """Give the pages of a range back; it reads as zeros."""
    _LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if _LIBC.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, num_bytes):
        raise OSError(ctypes.get_errno(), "fallocate failed to give memory back")
