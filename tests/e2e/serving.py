"""Starts `+role=serve` in real processes and talks to it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120
READY = re.compile(r"ready at (http://\S+)")


class Server:
    """A started instance; `client` once it is ready."""

    def __init__(self, directory: Path, words: list[str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.output = directory / "output.txt"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "inferkit", "+role=serve", "hydra.run.dir=run", *words],
                cwd=directory,
                env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.url = self._wait_until_ready()
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    def text(self) -> str:
        return self.output.read_text()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """Data of the events of a stream; raises where it has no [DONE]."""
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

    def until(self, condition: Any, limit_s: float = 15.0) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, self.stats()
            time.sleep(0.02)

    def wait_until_idle(self) -> None:
        """No request runs and no KV block is held on any rank."""

        def is_idle() -> bool:
            stats = self.stats()
            held = [rank["kv_used"] + rank["num_running"] for rank in stats["dp_ranks"]]
            return stats["requests"]["running"] == 0 and not any(held)

        self.until(is_idle)

    def ranks(self) -> list[psutil.Process]:
        """Rank processes: children of the fork server, which is a child of the parent."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if child.ppid() != self.process.pid]

    def wait(self, limit_s: float = 60.0) -> int:
        """Exit code of the parent."""
        return self.process.wait(timeout=limit_s)

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _wait_until_ready(self) -> str:
        end_s = time.monotonic() + DEADLINE_S
        while (found := READY.search(self.text())) is None:
            is_late = time.monotonic() > end_s
            if is_late or self.process.poll() is not None:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"not ready: {self.text()}")
            time.sleep(0.05)
        return found[1]


@contextlib.contextmanager
def serve(directory: Path, model: Path, *overrides: str, option: str = "llama") -> Iterator[Server]:
    words = [
        f"model={option}",
        f"model.path={model}",
        "model.dtype=float32",
        "disagg.http_port=0",
        *overrides,
    ]
    server = Server(directory, words)
    try:
        yield server
    finally:
        server.close()
