"""`+role=cluster` in real processes: it serves, survives the death of any role, and ends clean."""

import json
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

from inferkit import OfflineInference, SamplingParams, load_config

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 180
READY = re.compile(r"^inferkit: ready at (http://\S+)", re.MULTILINE)
PROMPT = [10 + i * 7 % 200 for i in range(50)]
BODY = {"prompt": PROMPT, "max_tokens": 16, "ignore_eos": True, "temperature": 0.0}


class Cluster:
    """A started cluster, as its user sees it."""

    def __init__(self, directory, model, *words):
        self.run_dir = directory / "run"
        self.output = directory / "output.txt"
        shared = ["model=llama", f"model.path={model}", "model.dtype=float32"]
        shared += ["kv_cache.block_size=16", "kv_cache.num_blocks=64", "router.port=0"]
        command = ["-m", "inferkit", "+role=cluster", "hydra.run.dir=run", *shared, *words]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=directory,
                env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def wait_until_ready(self):
        self.until(lambda: READY.search(self.text()))
        self.url = READY.search(self.text())[1]
        return self

    def text(self):
        return self.output.read_text()

    def until(self, condition):
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, self.logs()
            assert time.monotonic() < end_s, self.logs()
            time.sleep(0.1)

    def logs(self):
        files = sorted(self.run_dir.glob("*.log"))
        return self.text() + "".join(f"\n{path.name}:\n{path.read_text()}" for path in files)

    def generate(self):
        """Token ids, or None where the service says that it cannot now."""
        response = httpx.post(f"{self.url}/generate", json=BODY, timeout=DEADLINE_S)
        if response.status_code == 200:
            return response.json()["output_ids"]
        assert response.status_code in (500, 502, 503), response.text
        return None

    def pid_of(self, name):
        return json.loads((self.run_dir / "provenance.json").read_text())["processes"][name]["pid"]

    def family(self):
        """The processes of all roles and ranks."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def model(tiny_hf_model):
    return tiny_hf_model("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def expected(model):
    overrides = ["model=llama", f"model.path={model}", "model.dtype=float32"]
    llm = OfflineInference(load_config([*overrides, "data.input_truncated_len=96"]))
    sampling = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0)
    return llm.generate([PROMPT], sampling)[0].token_ids


@pytest.fixture
def cluster(tmp_path, model):
    started = []

    def start(*words):
        started.append(Cluster(tmp_path, model, *words))
        return started[-1]

    yield start
    for one in started:
        one.close()


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, [process.cmdline() for process in alive]


def test_a_cluster_serves_survives_and_ends(cluster, expected):
    service = cluster("cluster.prefill=2").wait_until_ready()
    assert service.generate() == expected
    names = {path.name for path in service.run_dir.glob("*.log")}
    assert {"router.log", "prefill0.log", "prefill1.log", "decode0.log"} <= names
    assert "[decode0] ready at" in service.text()

    for name in ("decode0", "prefill0", "router"):
        before = service.pid_of(name)
        os.kill(before, signal.SIGKILL)
        service.until(lambda name=name, before=before: service.pid_of(name) != before)
        assert f"[{name}] ended (killed by SIGKILL); starts again in 1 s" in service.text()
        service.until(lambda: _answers(service, expected))
        record = service.run_dir / f"{name}.2" / "provenance.json"
        service.until(record.exists)

    family = service.family()
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(timeout=DEADLINE_S) == 0, service.logs()
    assert_gone(family)
    text = service.text()
    assert text.index("[router] takes no new request") < text.index("[decode0] takes no new reque")
    result = json.loads((service.run_dir / "result.json").read_text())
    assert result["status"] == "ok"
    assert result["metrics"]["restarts"] == {
        "router": 1,
        "prefill0": 1,
        "prefill1": 0,
        "decode0": 1,
    }


def _answers(service, expected):
    try:
        found = service.generate()
    except httpx.TransportError:
        return False
    assert found in (None, expected)
    return found is not None


def test_a_killed_cluster_leaves_nothing_behind(cluster):
    service = cluster().wait_until_ready()
    family = service.family()
    assert len(family) >= 3
    service.process.kill()
    service.process.wait()
    assert_gone(family)


def test_a_second_signal_ends_all_at_once(cluster):
    service = cluster()
    service.until(lambda: "[router] router for" in service.text())
    family = service.family()
    service.process.send_signal(signal.SIGINT)
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(timeout=DEADLINE_S) in (0, 130), service.logs()
    assert_gone(family)


def test_a_role_that_cannot_start_ends_the_cluster_with_its_error(cluster):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        service = cluster(
            f"cluster.prefill_overrides='disagg.http_port={port}'",
        )
        assert service.process.wait(timeout=DEADLINE_S) == 1, service.logs()
    assert (
        "inferkit: prefill0 cannot start (exit code 2 after 1 starts; log "
        f"{service.run_dir}/prefill0.log): this machine cannot listen as configured"
    ) in service.text()
    assert f"disagg.http_port={port}\n      cannot be used on" in service.text()
