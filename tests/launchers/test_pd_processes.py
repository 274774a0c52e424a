"""The PD launchers with real roles: two nodes of a deployment, here both on this host."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.commands import environment

pytestmark = pytest.mark.multiproc

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
HERE = "127.0.0.1"
DEADLINE_S = 180
READY = re.compile(r"^\[router\] ready at (http://\S+)", re.MULTILINE)
FREE_PORTS = [
    "prefill:disagg.http_port=0",
    "prefill:disagg.bootstrap_port=0",
    "decode:disagg.http_port=0",
    "disagg.zmq_port=0",
]


class Node:
    """One launcher; its output goes into a file."""

    def __init__(self, directory, role, words, **variables):
        directory.mkdir()
        self.output = directory / "output.txt"
        self.logs = directory / "outputs" / "pd"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [LAUNCHERS / "pd_node.sh", HERE, HERE, *words],
                cwd=directory,
                env=environment(PYTHON=sys.executable, PD_ROLE=role) | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def text(self):
        return self.output.read_text()

    def end(self):
        """Ask for the end; returns the exit code and what is still alive."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=DEADLINE_S)
        return code, psutil.wait_procs(family, timeout=20)[1]

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def free_port():
    with socket.create_server((HERE, 0)) as server:
        return server.getsockname()[1]


def test_two_nodes_serve_and_a_killed_role_comes_back(tmp_path, tiny_hf_model):
    model = tiny_hf_model("llama", eos_token_id=None)
    words = ["model=llama", f"model.path={model}", "model.dtype=float32", *FREE_PORTS]
    words += ["kv_cache.block_size=16", "kv_cache.num_blocks=64"]
    variables = {"ROUTER_PORT": str(free_port()), "INFERKIT_SECRET": "of this test"}
    nodes = [Node(tmp_path / role, role, words, **variables) for role in ("prefill", "decode")]
    prefill, decode = nodes
    try:
        until(nodes, lambda: READY.search(decode.text()))
        url = READY.search(decode.text())[1]
        assert url == f"http://{HERE}:{variables['ROUTER_PORT']}"
        first = generate(url)
        assert len(first) == 8

        [role] = psutil.Process(prefill.process.pid).children()
        os.kill(role.pid, signal.SIGKILL)
        until(nodes, lambda: "[prefill] ended (killed by SIGKILL)" in prefill.text())
        until(nodes, lambda: prefill.text().count("[prefill] ready at") == 2)
        until(nodes, lambda: generate(url) == first)

        names = sorted(path.name for path in decode.logs.iterdir())
        assert names == ["decode.log", "router.log"]
        for node in (decode, prefill):
            code, alive = node.end()
            assert (code, alive) == (0, []), node.text()
    finally:
        for node in nodes:
            node.close()


def generate(url):
    """Output ids; None = not now."""
    body = {"prompt": list(range(10, 50)), "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    response = httpx.post(f"{url}/generate", json=body, timeout=DEADLINE_S)
    return response.json()["output_ids"] if response.status_code == 200 else None


def until(nodes, condition):
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        texts = "\n".join(node.text() for node in nodes)
        assert all(node.process.poll() is None for node in nodes), texts
        assert time.monotonic() < end_s, texts
        time.sleep(0.1)
