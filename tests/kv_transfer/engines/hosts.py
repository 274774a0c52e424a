"""Engines for the conformance tests, each in a process of its own where the engine allows it.

A test asks its `Site` for hosts. A host has the methods of `EngineOps`, whether it runs here (the
in-process engine) or in another process (all others).
"""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from inferkit.core.protocols import FenceState, Region, WriteState
from inferkit.kv_transfer.engines.in_process import Fabric, InProcessEngine
from inferkit.kv_transfer.engines.mooncake import MooncakeEngine
from inferkit.kv_transfer.engines.runs import TransferEngineError
from inferkit.kv_transfer.engines.shared_memory import SharedMemoryEngine
from inferkit.kv_transfer.engines.tcp import TcpEngine

ENGINES: dict[str, Any] = {
    "in_process": InProcessEngine,
    "shared_memory": SharedMemoryEngine,
    "tcp": TcpEngine,
    "mooncake": MooncakeEngine,
}
DEADLINE_S = 60.0
"""For what ends at once on a machine that has time."""


class EngineOps:
    """An engine and what a test does with it; peers and handles are named by numbers."""

    def __init__(self, engine_class: Any, kwargs: Mapping[str, Any]) -> None:
        self.engine = engine_class(**kwargs)
        self.engine.start()
        self.buffers: list[torch.Tensor] = []
        self.peers: list[Any] = []
        self.handles: list[Any] = []

    def add_buffer(self, num_bytes: int, value: int = 0) -> Region:
        buffer = self.engine.allocate(num_bytes)
        assert not buffer.any(), "allocated memory is not zeroed"
        buffer.fill_(value)
        self.buffers.append(buffer)
        return self.engine.register(buffer)

    def describe(self) -> dict[str, Any]:
        return self.engine.describe()

    def connect(self, description: Mapping[str, Any]) -> int:
        self.peers.append(self.engine.connect(description))
        return len(self.peers) - 1

    def disconnect(self, peer: int) -> None:
        self.engine.disconnect(self.peers[peer])

    def write(self, peer: int, transfer_id: int, runs: Any) -> int:
        self.handles.append(self.engine.write_batch(self.peers[peer], transfer_id, runs))
        return len(self.handles) - 1

    def poll(self, handle: int) -> tuple[WriteState, str]:
        return self.engine.poll(self.handles[handle]), self.handles[handle].error

    def cancel(self, handle: int) -> None:
        self.engine.cancel(self.handles[handle])

    def wait(self, handle: int) -> tuple[WriteState, str]:
        """Poll until the write has ended."""
        deadline = time.monotonic() + DEADLINE_S
        while self.engine.poll(self.handles[handle]) is WriteState.RUNNING:
            assert time.monotonic() < deadline, "the write does not end"
            time.sleep(0.0005)
        return self.poll(handle)

    def put(self, peer: int, transfer_id: int, runs: Any) -> tuple[WriteState, str]:
        return self.wait(self.write(peer, transfer_id, runs))

    def open(self, transfer_id: int) -> None:
        self.engine.open_transfer(transfer_id)

    def close_transfer(self, transfer_id: int) -> None:
        self.engine.close_transfer(transfer_id)

    def fence(self, transfer_id: int) -> FenceState:
        return self.engine.fence(transfer_id)

    def fenced(self, transfer_id: int) -> float:
        """Fence until it is done; returns the seconds that took."""
        start = time.monotonic()
        while self.engine.fence(transfer_id) is not FenceState.DONE:
            assert time.monotonic() < start + DEADLINE_S, "the fence does not end"
            time.sleep(0.001)
        return time.monotonic() - start

    def take_broken(self) -> list[int]:
        return self.engine.take_broken()

    def fill(self, region: int, value: int) -> None:
        self.buffers[region].fill_(value)

    def fill_part(self, region: int, start: int, num_bytes: int, value: int) -> None:
        self.buffers[region][start : start + num_bytes] = value

    def count_part_other(self, region: int, start: int, num_bytes: int, value: int) -> int:
        return int((self.buffers[region][start : start + num_bytes] != value).sum())

    def randomize(self, region: int, seed: int) -> None:
        buffer = self.buffers[region]
        data = np.random.default_rng(seed).integers(0, 256, len(buffer), dtype=np.uint8)
        buffer.copy_(torch.from_numpy(data))

    def read(self, region: int) -> "np.ndarray[Any, Any]":
        return self.buffers[region].numpy().copy()

    def count_other(self, region: int, value: int) -> int:
        """Bytes of the region that differ from `value`."""
        return int((self.buffers[region] != value).sum())

    def attribute(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None:
        self.engine.close()


class RemoteHost:
    """`EngineOps` in a process of its own; every method call waits for its result."""

    def __init__(self, engine_class: Any, kwargs: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context("forkserver")
        # The server is one for all tests: what other tests preload is in the list too.
        context.set_forkserver_preload(
            ["inferkit.offline.inference", "tests.parallel.cases", __name__]
        )
        self._channel, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, engine_class, dict(kwargs)), daemon=True
        )
        self.process.start()
        theirs.close()
        self._receive()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._channel.send((name, args))
            return self._receive()

        return call

    def tell(self, name: str, *args: Any) -> None:
        """Call without waiting; `hear` has the result."""
        self._channel.send((name, args))

    def hear(self) -> Any:
        return self._receive()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self._channel.send(("end", ()))
            self.process.join(timeout=20)
        self.kill()
        self._channel.close()

    def _receive(self) -> Any:
        if not self._channel.poll(2 * DEADLINE_S):
            raise TimeoutError("an engine's process does not answer")
        is_good, value = self._channel.recv()
        if is_good:
            return value
        if isinstance(value, TransferEngineError):
            raise value
        raise AssertionError(value)


def _serve(channel: Any, engine_class: Any, kwargs: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    ops = None
    name, args = "start", ()
    while name != "end":
        try:
            if ops is None:
                ops = EngineOps(engine_class, kwargs)
                result = None
            else:
                result = getattr(ops, name)(*args)
            answer = (True, result)
        except TransferEngineError as error:
            answer = (False, error)
        except BaseException:
            answer = (False, traceback.format_exc())
        channel.send(answer)
        try:
            name, args = channel.recv()
        except EOFError:
            break
    if ops is not None:
        ops.close()


class Site:
    """Where the engines of one test live."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.is_local = engine == "in_process"
        self.has_fence = engine != "mooncake"
        self.fabric = Fabric()
        self.hosts: list[Any] = []

    def host(self, *, epoch: int, **kwargs: Any) -> Any:
        kwargs["epoch"] = epoch
        if self.is_local:
            host: Any = EngineOps(ENGINES[self.engine], kwargs | {"fabric": self.fabric})
        else:
            host = RemoteHost(ENGINES[self.engine], kwargs)
        self.hosts.append(host)
        return host

    def receiver(self, *, epoch: int = 1, num_bytes: int = 1 << 20, **kwargs: Any) -> Any:
        """A host with one region of zeros."""
        host = self.host(epoch=epoch, **kwargs)
        host.add_buffer(num_bytes)
        return host

    def writer(self, *, epoch: int = 101, num_bytes: int = 1 << 20, **kwargs: Any) -> Any:
        """A host with one region of ones."""
        host = self.host(epoch=epoch, receives=False, **kwargs)
        host.add_buffer(num_bytes, 1)
        return host

    def hold(self) -> None:
        """Keep what is posted in flight, where a test can do that."""
        self.fabric.is_held = True

    def settle(self) -> None:
        """Let what is in flight land."""
        self.fabric.is_held = False
        self.fabric.land_all()

    def kill(self, host: Any) -> None:
        if self.is_local:
            self.fabric.remove(host.engine)
        else:
            host.kill()

    def close(self) -> None:
        for host in self.hosts:
            if self.is_local:
                host.close()
            else:
                host.end()
