"""Routers, prefill and decode instances in real processes, started by the command line.

Every wait has a limit. What an instance holds is read from its /stats.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 240.0
"""Processes import torch; the machine may be busy with several such deployments."""
ANSWER_LIMIT_S = 120.0
IDLE_LIMIT_S = 30.0
READY = re.compile(r"^inferkit: ready at (http://\S+)", re.MULTILINE)
HELD = ("kv_used", "num_running", "num_waiting", "num_requests", "outstanding_tokens")
HELD_BY_HAND_OFF = (
    "num_known",
    "num_stashed",
    "num_writes_queued",
    "num_writes_in_flight",
    "num_fencing",
    "num_quarantined",
)
SERVICE_ERRORS = (500, 502, 503, 504)


class Service:
    """The HTTP interface of a router or an instance."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=ANSWER_LIMIT_S)

    def close(self) -> None:
        self.client.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def generate(self, prompt: Any, **body: Any) -> dict[str, Any]:
        response = self.post("/generate", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """Data of the events of a stream; an error event is one of them, and the last."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line:
                    yield json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream has no end")

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.client.get("/stats").json()
        return stats

    def open(self, **body: Any) -> socket.socket:
        """A client that has sent POST /generate and may leave at any moment."""
        content = json.dumps(body).encode()
        lines = ["POST /generate HTTP/1.1", "Host: x", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
        address = httpx.URL(self.url)
        client = socket.create_connection((address.host, address.port), timeout=ANSWER_LIMIT_S)
        client.sendall(head.encode() + content)
        return client


class Command:
    """`python -m inferkit ...` while it runs, and what it prints."""

    def __init__(self, directory: Path, words: Sequence[str], **variables: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.run_dir = directory / "run"
        self.output = directory / "output.txt"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "inferkit", f"hydra.run.dir={self.run_dir}", *words],
                cwd=directory,
                env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"} | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self.output.read_text()

    def logs(self) -> str:
        files = sorted(self.run_dir.glob("*.log"))
        return self.text() + "".join(f"\n{path.name}:\n{path.read_text()}" for path in files)

    def url(self, pattern: re.Pattern[str] = READY) -> str:
        """Waits until it is printed."""
        self.until(lambda: pattern.search(self.text()), START_LIMIT_S)
        found = pattern.search(self.text())
        assert found is not None
        return next(group for group in found.groups() if group)

    def until(self, condition: Callable[[], Any], limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, self.logs()
            assert time.monotonic() < end_s, self.logs()
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        """It, and all processes that it has started."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, limit_s: float = 90.0) -> int:
        return self.process.wait(timeout=limit_s)

    def close(self) -> None:
        """End it and all that it has started, whatever state it is in."""
        if self.process.poll() is None:
            family = self.family()
            self.terminate()
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=30)
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


class Deployment:
    """What a client sees of a router and the instances behind it."""

    def __init__(self, command: Command, url: str) -> None:
        self.command = command
        self.router = Service(url)
        self._services: dict[str, Service] = {}

    def close(self) -> None:
        for service in (self.router, *self._services.values()):
            service.close()

    def instances(self, role: str = "") -> list[dict[str, Any]]:
        """What the router knows of instances that it uses."""
        entries = self.router.stats()["instances"]
        return [e for e in entries if e["is_usable"] and role in ("", e["role"])]

    def service(self, url: str) -> Service:
        if url not in self._services:
            self._services[url] = Service(url)
        return self._services[url]

    def stats(self, role: str) -> list[dict[str, Any]]:
        """/stats of all instances of a role."""
        return [self.service(entry["url"]).stats() for entry in self.instances(role)]

    def ranks(self, role: str, index: int = 0) -> list[psutil.Process]:
        """Rank processes of an instance: children of its fork server."""
        parent = self.parent(role, index)
        return [child for child in parent.children(recursive=True) if child.ppid() != parent.pid]

    def parent(self, role: str, index: int = 0) -> psutil.Process:
        """The process of an instance that has its HTTP interface."""
        return psutil.Process(self.stats(role)[index]["pid"])

    def num_running(self, role: str) -> int:
        """Requests that compute there now."""
        return sum(rank["num_running"] for stats in self.stats(role) for rank in stats["dp_ranks"])

    def held(self) -> dict[str, int]:
        """All that is held for requests anywhere; {} = nothing."""
        held = {"router requests": self.router.stats()["requests"]["running"]}
        for stats in (*self.stats("prefill"), *self.stats("decode")):
            name = stats["instance_id"]
            held[f"{name} requests"] = stats["requests"]["running"]
            for rank in stats["dp_ranks"]:
                numbers = {key: rank[key] for key in HELD} | {
                    key: value for key, value in rank["hand_off"].items() if key in HELD_BY_HAND_OFF
                }
                held |= {f"{name} {rank['dp_rank']} {k}": v for k, v in numbers.items()}
        return {key: value for key, value in held.items() if value}

    def until(self, condition: Callable[[], Any], limit_s: float = IDLE_LIMIT_S) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, f"{self.held()}\n{self.command.logs()}"
            time.sleep(0.05)

    def wait_until_idle(self, limit_s: float = IDLE_LIMIT_S) -> None:
        """Nothing is held anywhere, and decode has all its slots."""
        self.until(lambda: not self.held(), limit_s)

    def wait_until_served(self, limit_s: float = START_LIMIT_S) -> None:
        """The router has a pair that has generated."""

        def is_ready() -> bool:
            try:
                return self.router.client.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        self.until(is_ready, limit_s)


def generate_all(
    service: Service, bodies: Sequence[dict[str, Any]], at_once: int
) -> list[dict[str, Any]]:
    """The answers to /generate, in order; every other one is read as a stream."""

    def run(index: int) -> dict[str, Any]:
        body = bodies[index]
        if index % 2 == 0:
            return service.generate(**body)
        chunks = list(service.stream("/generate", **body))
        assert "error" not in chunks[-1], chunks[-1]
        return {
            "output": "".join(chunk["output"] for chunk in chunks),
            "output_ids": [token for chunk in chunks for token in chunk["output_ids"]],
            "finish_reason": chunks[-1]["finish_reason"],
            "bootstrap_room": chunks[0]["bootstrap_room"],
        }

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run, range(len(bodies))))


@contextlib.contextmanager
def cluster(directory: Path, *words: str, **variables: str) -> Iterator[Deployment]:
    """`+role=cluster`, once it is ready."""
    command = Command(directory, ["+role=cluster", "router.port=0", *words], **variables)
    deployment = None
    try:
        deployment = Deployment(command, command.url())
        yield deployment
    finally:
        if deployment is not None:
            deployment.close()
        command.close()


class Nodes:
    """A router and instances that are started one by one, at ports that stay theirs."""

    def __init__(self, directory: Path, *words: str, **variables: str) -> None:
        self.directory = directory
        self.words = words
        self.variables = variables
        router, prefill, decode, bootstrap = free_ports(4)
        zmq_prefill, zmq_decode = free_pair_of_ports(), free_pair_of_ports()
        url = f"router_url=http://127.0.0.1:{router}"
        self.roles = {
            "router": ["+role=router", f"router.port={router}"],
            "prefill": [
                "+role=prefill",
                f"disagg.{url}",
                f"disagg.http_port={prefill}",
                f"disagg.bootstrap_port={bootstrap}",
                f"disagg.zmq_port={zmq_prefill}",
            ],
            "decode": [
                "+role=decode",
                f"disagg.{url}",
                f"disagg.http_port={decode}",
                f"disagg.zmq_port={zmq_decode}",
            ],
        }
        self.url = f"http://127.0.0.1:{router}"
        self.commands: dict[str, Command] = {}
        self._num_starts = 0

    def start(self, role: str) -> Command:
        """Start a role, or start it again at the same address."""
        self._num_starts += 1
        common = [w for w in self.words if role != "router" or w.startswith(("model", "router"))]
        self.commands[role] = Command(
            self.directory / f"{role}-{self._num_starts}",
            [*self.roles[role], *common],
            **self.variables,
        )
        return self.commands[role]

    def deployment(self) -> Deployment:
        self.commands["router"].until(self._is_up, START_LIMIT_S)
        return Deployment(self.commands["router"], self.url)

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        for command in self.commands.values():
            command.close()


def assert_ended(processes: Iterable[psutil.Process], limit_s: float = 20.0) -> None:
    _, alive = psutil.wait_procs(list(processes), timeout=limit_s)
    assert not alive, [process.cmdline() for process in alive if process.is_running()]


def free_ports(count: int) -> list[int]:
    """Ports that no one listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports: list[int] = [one.getsockname()[1] for one in sockets]
    return ports


def free_pair_of_ports() -> int:
    """The first of two adjacent ports that no one listens on now."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
