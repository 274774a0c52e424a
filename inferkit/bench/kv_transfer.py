"""How fast the transfer engines are, against a memory copy and a plain socket on this machine.

    python -m inferkit.bench.kv_transfer [--engines shared_memory,tcp,mooncake] [--rounds 9]
                                         [--mib 128] [--threads 4]

A second process receives. Every round moves the same bytes by each engine in turn, and by two
plain means: one copy between two buffers of one process, and one socket that sends one buffer
whole. A ratio is the median over rounds of the two measurements of that round. Engines that cannot
run here are named with the reason. The last line of stdout is one JSON object.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from inferkit.core.protocols import TransferEngine, WriteState
from inferkit.kv_transfer.engines.memfabric import MemFabricEngine
from inferkit.kv_transfer.engines.mooncake import MooncakeEngine
from inferkit.kv_transfer.engines.runs import Ints, TransferEngineError, as_runs, expand_runs
from inferkit.kv_transfer.engines.shared_memory import SharedMemoryEngine
from inferkit.kv_transfer.engines.tcp import TcpEngine

ENGINES: dict[str, Any] = {
    engine.name: engine
    for engine in (SharedMemoryEngine, TcpEngine, MooncakeEngine, MemFabricEngine)
}
BASELINES = ("memory_copy", "socket")
POLL_S = 0.0001
TRANSFER_ID = 1
SLOW_S = 5.0
"""An engine that takes longer for a shape is not measured with it."""
SMALL_BYTES = 64
NUM_SMALL = 50


def main() -> None:
    args = _parse(sys.argv[1:])
    console = Console(stderr=True)
    num_bytes = args.mib << 20
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(there, num_bytes, args.threads), daemon=True)
    process.start()
    there.close()
    bench = Bench(here, num_bytes, args.threads)
    for name in args.engines:
        bench.add(name)
    rounds = []
    for number in range(args.rounds):
        console.print(f"round {number + 1}/{args.rounds}")
        rounds.append(bench.round(number))
    bench.close()
    process.join(timeout=60)
    report = {
        "num_bytes": num_bytes,
        "rounds": args.rounds,
        "threads": args.threads,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "not_run": bench.not_run,
        **_summary(rounds),
    }
    console.print(_table(report))
    for name, why in bench.not_run.items():
        console.print(f"{name} did not run: {why}", markup=False)
    print(json.dumps(report))


class Bench:
    """The writing side of all engines. `source` is what each of them sends."""

    def __init__(self, receiver: Connection, num_bytes: int, num_threads: int) -> None:
        self.receiver = receiver
        self.num_threads = num_threads
        self.source = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
        self.copy = np.zeros_like(self.source)
        self.shapes = _shapes(num_bytes)
        self.not_run: dict[str, str] = {}
        self.too_slow: set[tuple[str, str]] = set()
        self.engines: dict[str, tuple[TransferEngine, Any]] = {}
        self.socket = socket.create_connection(receiver.recv())
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def add(self, name: str) -> None:
        """Start an engine on both sides, and check that it moves bytes."""
        try:
            engine = ENGINES[name](epoch=2, receives=False, num_threads=self.num_threads)
            engine.register(torch.from_numpy(self.source))
            engine.start()
            description = self._ask("start", name)
        except TransferEngineError as error:
            self.not_run[name] = str(error)
            return
        peer = engine.connect(description)
        self.engines[name] = (engine, peer)
        for shape, runs in self.shapes.items():
            taken_s = _seconds(lambda runs=runs: self._write(name, runs))  # type: ignore[misc]
            if self._ask("read", name) != _digest(self.source, runs):
                sys.exit(f"{name}: other bytes arrived than were sent ({shape})")
            if taken_s > SLOW_S:
                self.too_slow.add((name, shape))
                self.not_run[f"{name}, {shape}"] = f"one write took {taken_s:.1f} s"

    def round(self, number: int) -> dict[str, dict[str, float]]:
        """Shape -> what -> bytes/s; "latency" -> engine -> seconds of a small write."""
        figures: dict[str, dict[str, float]] = {}
        for shape, runs in self.shapes.items():
            ways: dict[str, Callable[[], None]] = {
                "memory_copy": self._copy,
                "socket": self._send,
            }
            for name in self.engines:
                if (name, shape) in self.too_slow:
                    continue
                ways[name] = lambda name=name, runs=runs: self._write(name, runs)  # type: ignore[misc]
            order = list(ways)
            start = number % len(order)
            taken = {what: _seconds(ways[what]) for what in order[start:] + order[:start]}
            figures[shape] = {what: len(self.source) / taken[what] for what in order}
        small = np.array([(0, 0, 0, 0, SMALL_BYTES)])
        figures["latency"] = {
            name: statistics.median(
                _seconds(lambda name=name: self._write(name, small, poll_s=0))  # type: ignore[misc]
                for _ in range(NUM_SMALL)
            )
            for name in self.engines
        }
        return figures

    def close(self) -> None:
        self._ask("end", "")
        for engine, _ in self.engines.values():
            engine.close()
        self.socket.close()

    def _ask(self, what: str, name: str) -> Any:
        self.receiver.send((what, name))
        answer = self.receiver.recv()
        if isinstance(answer, TransferEngineError):
            raise answer
        return answer

    def _copy(self) -> None:
        np.copyto(self.copy, self.source)

    def _send(self) -> None:
        self.socket.sendall(self.source.data)
        assert self.socket.recv(1), "the receiver has ended"

    def _write(self, name: str, runs: Ints, *, poll_s: float = POLL_S) -> None:
        engine, peer = self.engines[name]
        handle = engine.write_batch(peer, TRANSFER_ID, runs)
        while (state := engine.poll(handle)) is WriteState.RUNNING:
            time.sleep(poll_s)
        if state is not WriteState.DONE:
            sys.exit(f"{name}: the write is {state}: {handle.error}")


def _shapes(num_bytes: int) -> dict[str, Ints]:
    """What a transfer may look like; all shapes move every byte once."""
    rng = np.random.default_rng(1)

    def scattered(size: int) -> Ints:
        places = np.arange(num_bytes // size) * size
        zeros = np.zeros_like(places)
        to = rng.permutation(places)
        return np.stack((zeros, rng.permutation(places), zeros, to, zeros + size), axis=1)

    # Heads of 256 bytes out of tokens of 1 KiB here, 2 KiB there, in blocks of 128 tokens.
    head, tokens = 256, num_bytes // 1024
    pieces = tokens // 2
    heads = [
        (0, first * pieces * 1024 + h * head, 0, (h + 4 * first) * head, head, pieces, 1024, 2048)
        for h in range(4)
        for first in range(2)
    ]
    return {
        "1 run": np.array([(0, 0, 0, 0, num_bytes)]),
        "of 256 KiB": scattered(256 << 10),
        "of 16 KiB": scattered(16 << 10),
        "heads, 256 B": np.array(heads),
    }


def _digest(source: Any, runs: Ints) -> int:
    """A checksum of the receiver's memory after the runs."""
    memory = np.zeros_like(source)
    for row in expand_runs(as_runs(runs)).tolist():
        _, start, _, to, length = row[:5]
        memory[to : to + length] = source[start : start + length]
    return zlib.crc32(memory)


def _receive(writer: Connection, num_bytes: int, num_threads: int) -> None:
    """The other process: one region of `num_bytes` per engine, and the plain socket."""
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_socket, args=(server, num_bytes), daemon=True).start()
    writer.send(server.getsockname())
    engines: dict[str, tuple[TransferEngine, Any]] = {}
    while True:
        what, name = writer.recv()
        if what == "end":
            break
        if what == "read":
            writer.send(zlib.crc32(engines[name][1].numpy()))
            continue
        try:
            engine = ENGINES[name](epoch=1, num_threads=num_threads)
            memory = engine.allocate(num_bytes)
            engine.register(memory)
            engine.start()
            engine.open_transfer(TRANSFER_ID)
            engines[name] = (engine, memory)
            writer.send(engine.describe())
        except TransferEngineError as error:
            writer.send(error)
    for engine, _ in engines.values():
        engine.close_transfer(TRANSFER_ID)
        engine.close()
    writer.send("ended")


def _serve_socket(server: socket.socket, num_bytes: int) -> None:
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = np.zeros(num_bytes, np.uint8).data
    position = 0
    while num_read := connection.recv_into(buffer[position:]):
        position += num_read
        if position == num_bytes:
            connection.send(b"x")
            position = 0


def _seconds(function: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


def _summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    shapes: dict[str, Any] = {}
    for shape in rounds[0]:
        if shape == "latency":
            continue
        rows: dict[str, Any] = {}
        for what in rounds[0][shape]:
            row = {"bytes_per_s": statistics.median(r[shape][what] for r in rounds)}
            for baseline in BASELINES:
                ratios = [r[shape][what] / r[shape][baseline] for r in rounds]
                row[f"of_{baseline}"] = statistics.median(ratios)
                row[f"of_{baseline}_min"], row[f"of_{baseline}_max"] = min(ratios), max(ratios)
            rows[what] = row
        shapes[shape] = rows
    latency = {
        name: statistics.median(r["latency"][name] for r in rounds) for name in rounds[0]["latency"]
    }
    return {"shapes": shapes, "latency_s": latency}


def _table(report: dict[str, Any]) -> Table:
    table = Table(
        title=f"{report['num_bytes'] >> 20} MiB, median of {report['rounds']} rounds; "
        f"{report['cores']} cores, load {report['load']:.1f}"
    )
    for column in ("runs", "", "GB/s", "of copy", "of socket", "us, 64B"):
        justify: Any = "left" if column in ("runs", "") else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for shape, rows in report["shapes"].items():
        for what, row in rows.items():
            latency_s = report["latency_s"].get(what)
            table.add_row(
                shape if what == BASELINES[0] else "",
                what,
                f"{row['bytes_per_s'] / 1e9:.2f}",
                _ratio(row, "memory_copy"),
                _ratio(row, "socket"),
                f"{latency_s * 1e6:.0f}" if latency_s is not None else "",
            )
        table.add_section()
    return table


def _ratio(row: dict[str, float], baseline: str) -> str:
    key = f"of_{baseline}"
    return f"{row[key]:.2f} {row[f'{key}_min']:.1f}..{row[f'{key}_max']:.1f}"


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m inferkit.bench.kv_transfer",
        description="Measure the transfer engines of this machine.",
    )
    parser.add_argument(
        "--engines", type=_engine_names, default=list(ENGINES), help=", ".join(ENGINES)
    )
    parser.add_argument("--rounds", type=_at_least_one, default=9)
    parser.add_argument("--mib", type=_at_least_one, default=128)
    parser.add_argument("--threads", type=_at_least_one, default=4)
    return parser.parse_args(argv)


def _engine_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in ENGINES:
            raise argparse.ArgumentTypeError(
                f"{name} is no engine; allowed are {', '.join(ENGINES)}"
            )
    return names


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range; allowed is >= 1")
    return number


if __name__ == "__main__":
    main()
