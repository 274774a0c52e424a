"""Ranks for tests: processes that have met once and then run one function after another.

Starting a process that imports torch costs seconds; a case in a running pool costs what it does.
"""

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from inferkit.core.place import RankPlace

TIMEOUT_S = 240


class RankPool:
    """`world_size` processes, joined as ranks over gloo on the loopback interface."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.processes: list[Any] = []
        self.channels: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(place, *args)` on every rank at once; the results in rank order.

        `function` is a module's own (it is pickled by name). Where a rank fails, all end, and the
        traceback of the first one that failed is raised.
        """
        if not self.processes:
            self._start()
        for channel in self.channels:
            channel.send((function, args))
        results: dict[Connection, Any] = {}
        while len(results) < self.world_size:
            missing = [channel for channel in self.channels if channel not in results]
            ready = wait(missing, timeout=TIMEOUT_S)
            if not ready:
                self.close()
                raise TimeoutError(f"ranks did not answer within {TIMEOUT_S} s")
            for channel in ready:
                try:
                    is_good, value = channel.recv()
                except EOFError:
                    is_good, value = False, "a rank died"
                if not is_good:
                    self.close()
                    raise AssertionError(f"rank {self.channels.index(channel)}:\n{value}")
                results[channel] = value
        return [results[channel] for channel in self.channels]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, channels, self.channels = [], self.channels, list(self.channels)
        for channel in channels:
            channel.close()

    def _start(self) -> None:
        # Forked from a server that has imported what every case needs, once for all pools.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["inferkit.offline.inference", "tests.parallel.cases"])
        self.channels = []
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            place = RankPlace(
                rank=rank,
                local_rank=rank,
                world_size=self.world_size,
                local_world_size=self.world_size,
                master_port=port,
            )
            process = context.Process(target=_serve, args=(place, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.channels.append(ours)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _serve(place: RankPlace, channel: Connection) -> None:
    import torch

    from inferkit.parallel.comm_manager import join_ranks

    torch.set_num_threads(1)
    join_ranks(place, backend="gloo")
    while True:
        try:
            function, args = channel.recv()
        except EOFError:
            return
        try:
            value: tuple[bool, Any] = (True, function(place, *args))
        except BaseException:
            value = (False, traceback.format_exc())
        channel.send(value)
