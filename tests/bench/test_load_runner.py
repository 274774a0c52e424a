"""`runner=load` in real processes: what it leaves, and that it leaves no process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240
LOAD = ["load.num_requests=6", "load.prompt_len=20", "load.output_len=5"]
POOL = ["kv_cache.block_size=16", "kv_cache.num_blocks=64", "platform.num_threads=1"]


def start(tmp_path: Path, model: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "inferkit", "runner=load", "hydra.run.dir=run", "model=llama"]
    command += [f"model.path={model}", "model.dtype=float32", *LOAD, *POOL, *words]
    with (tmp_path / "output.txt").open("w") as file:
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def left_behind(tmp_path: Path) -> list[psutil.Process]:
    """Processes of a run in this folder, and of its service."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(tmp_path):
                found.append(process)
        except psutil.Error:
            continue
    return found


def until_none_is_left(tmp_path: Path) -> None:
    end_s = time.monotonic() + 30
    while left := left_behind(tmp_path):
        assert time.monotonic() < end_s, left
        time.sleep(0.1)


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_cluster_is_started_loaded_at_a_rate_and_stopped(tmp_path, tiny_hf_model):
    words = ["+role=cluster", "load.rate=50", "cluster.decode_overrides='parallel=dp2'"]
    process = start(tmp_path, tiny_hf_model("llama"), *words)
    assert process.wait(DEADLINE_S) == 0, (tmp_path / "output.txt").read_text()
    run = tmp_path / "run"
    metrics, requests = read(run / "metrics.json"), lines_of(run / "requests.jsonl")
    assert metrics["num_requests"] == 6 and metrics["num_failed"] == 0
    assert metrics["finish_reasons"] == {"length": 6}
    assert metrics["num_output_tokens"] == 30 and metrics["num_prompt_tokens"] == 120
    assert metrics["num_devices"] == 3
    assert metrics["ttft_s"]["num"] == metrics["send_delay_s"]["num"] == 6
    assert sorted(request["request_id"] for request in requests) == list(range(6))
    assert all(len(request["token_ids"]) == 5 for request in requests)
    assert {request["due_s"] > 0 for request in requests} == {True, False}
    result = read(run / "result.json")
    assert result["status"] == "ok" and result["metrics"] == metrics
    assert read(run / "service" / "result.json")["status"] == "ok"
    text = (tmp_path / "output.txt").read_text()
    assert "6 requests of 20 + 5 tokens, 50 per second" in text and "Traceback" not in text
    until_none_is_left(tmp_path)


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_signal_ends_the_load_and_the_service(tmp_path, tiny_hf_model):
    # One request after the other, far more than there is time for.
    words = ["+role=serve", "load.num_requests=100000", "load.concurrency=1"]
    process = start(tmp_path, tiny_hf_model("llama"), *words)
    requests, end_s = tmp_path / "run" / "requests.jsonl", time.monotonic() + DEADLINE_S
    while not (requests.exists() and requests.stat().st_size):
        assert process.poll() is None and time.monotonic() < end_s
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    result = read(tmp_path / "run" / "result.json")
    assert result["status"] == "interrupted" and "SIGTERM" in result["error"]
    assert "Traceback" not in (tmp_path / "output.txt").read_text()
    until_none_is_left(tmp_path)


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_service_that_cannot_start_is_told_with_its_own_error(tmp_path, tiny_hf_model):
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_hf_model("llama").iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    process = start(tmp_path, model, "+role=serve")
    assert process.wait(DEADLINE_S) == 1
    text = (tmp_path / "output.txt").read_text()
    assert "inferkit: the service has ended (exit code 1" in text
    assert "safetensors" in text and "Traceback" not in text
    until_none_is_left(tmp_path)
