"""The main job in real processes: its run directory, sweeps, and what a kill leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from inferkit.config.space import ConfigSpace
from inferkit.inspect.recorded import run_snapshot

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 90


def command(model, *overrides):
    return [
        sys.executable,
        "-m",
        "inferkit",
        "model=llama",
        f"model.path={model}",
        "model.dtype=float32",
        *overrides,
    ]


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}


def run(directory, model, *overrides):
    return subprocess.run(
        command(model, *overrides),
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def start_long_run(directory, model):
    """A run that would take minutes; returns it and its worker, which is generating."""
    parent = subprocess.Popen(
        command(
            model,
            "hydra.run.dir=run",
            "data.limit=1",
            "scheduler.max_new_tokens=1500",
            "scheduler.fixed_steps=true",
            "kv_cache.block_size=1",
        ),
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log = directory / "run" / "rank0.log"
    deadline = time.monotonic() + DEADLINE_S
    while not (log.exists() and "step=1 " in log.read_text()):
        assert parent.poll() is None, parent.stdout.read()
        assert time.monotonic() < deadline, "the worker did not start"
        time.sleep(0.05)
    children = psutil.Process(parent.pid).children(recursive=True)
    # Ranks are children of the fork server, which is one of the parent.
    workers = [child for child in children if child.ppid() != parent.pid]
    assert len(workers) == 1
    return parent, workers[0]


def test_run_directory_holds_what_the_run_was(tmp_path, tiny_hf_model):
    overrides = ["data.limit=3", "scheduler.max_new_tokens=8", "model.enable_profiler=true"]
    result = run(tmp_path, tiny_hf_model("llama", eos_token_id=None), *overrides)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    (run_dir,) = (tmp_path / "outputs").glob("*/*")
    assert str(run_dir) in result.stdout

    lines = (run_dir / "generations.jsonl").read_text().splitlines()
    generations = [json.loads(line) for line in lines]
    assert len(generations) == 3
    for generation in generations:
        assert generation["prompt"] and isinstance(generation["text"], str)
        assert len(generation["token_ids"]) == 8 and generation["finish_reason"] == "length"
        assert generation["ttft_s"] > 0

    metrics = json.loads((run_dir / "metrics.json").read_text())
    assert metrics["num_requests"] == 3
    assert 3 <= metrics["kv_blocks_used_max"] <= 9
    assert metrics["peak_memory_bytes"] > 2**20

    config = yaml.safe_load((run_dir / "config.resolved.yaml").read_text())
    assert config["scheduler"]["batch_size"] == 32
    assert config["platform"]["_target_"] == "inferkit.platforms.cpu.CpuPlatform"
    provenance = json.loads((run_dir / "provenance.json").read_text())
    assert provenance["model"]["weights"][0]["name"] == "model.safetensors"
    assert provenance["rank_environment"]["GOMP_SPINCOUNT"]
    found = run_snapshot(run_dir, ConfigSpace())
    assert found.leaves["data.limit"].origins[-1].text == "data.limit=3"
    assert found.leaves["engine.max_model_len"].origins[-1].kind == "automatic"
    derived = {one.name: one.value for one in found.derived}
    assert provenance["kv_blocks"] == {"full_attention": derived["kv_cache.blocks"]}
    assert provenance["weights_bytes"] == derived["rank.weight_bytes"]
    log = (run_dir / "rank0.log").read_text()
    assert "[rank0]" in log and "kind=prefill" in log and "kind=decode" in log
    for phase in ("prefill", "decode"):
        trace = json.loads((run_dir / "prof" / phase / "rank0.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert f"{phase} step" in names and "aten::scaled_dot_product_attention" in names
    assert (run_dir / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_command_gives_the_same_tokens(tmp_path, tiny_hf_model):
    overrides = ["data.limit=4", "scheduler.max_new_tokens=6", "data.temperature=1", "data.seed=7"]
    texts = []
    for batch_size in (4, 1):
        folder = f"hydra.run.dir=run{batch_size}"
        size = f"scheduler.batch_size={batch_size}"
        result = run(tmp_path, tiny_hf_model("llama"), *overrides, folder, size)
        assert result.returncode == 0, result.stderr
        lines = (tmp_path / f"run{batch_size}" / "generations.jsonl").read_text().splitlines()
        texts.append([json.loads(line)["token_ids"] for line in lines])
    assert texts[0] == texts[1]


def test_a_terminal_that_cannot_show_the_text_does_not_fail_the_run(tmp_path, tiny_hf_model):
    overrides = ["scheduler.max_new_tokens=2", "hydra.run.dir=run"]
    variables = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    result = subprocess.run(
        command(tiny_hf_model("llama"), *overrides),
        cwd=tmp_path,
        env=environment() | variables,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "ok"


def test_a_closed_pipe_does_not_fail_the_run(tmp_path, tiny_hf_model):
    parent = subprocess.Popen(
        command(tiny_hf_model("llama"), "data.limit=1", "hydra.run.dir=run"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    parent.stdout.close()
    assert parent.wait(timeout=DEADLINE_S) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "ok"


def test_random_weights_need_no_weight_files(tmp_path, tiny_hf_model):
    folder = tmp_path / "no_weights"
    shutil.copytree(tiny_hf_model("llama"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    result = run(tmp_path, folder, "model.with_ckpt=false", "data.limit=1", "hydra.run.dir=run")
    assert result.returncode == 0, result.stderr
    provenance = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert "weights" not in provenance["model"] and "configs" in provenance["model"]


def test_a_failing_cell_ends_no_other(tmp_path, tiny_hf_model):
    """A model that is not there fails in its worker; the pre-flight cannot see a hub id's files."""
    result = run(
        tmp_path,
        tiny_hf_model("llama"),
        "-m",
        f"model.path=nobody/nothing,{tiny_hf_model('llama')}",
        "data.limit=1",
        "scheduler.max_new_tokens=2",
    )
    assert result.returncode == 1
    (sweep,) = (tmp_path / "outputs" / "sweeps").glob("*/*")
    states = [json.loads((sweep / str(n) / "result.json").read_text()) for n in range(2)]
    assert [state["status"] for state in states] == ["failed", "ok"]
    assert "model.path=nobody/nothing" in states[0]["error"]
    assert (sweep / "1" / "generations.jsonl").exists()
    assert "nobody/nothing" in result.stdout + result.stderr


def test_a_killed_worker_is_named_and_ends_the_run(tmp_path, tiny_hf_model):
    parent, worker = start_long_run(tmp_path, tiny_hf_model("llama"))
    worker.kill()
    output, _ = parent.communicate(timeout=30)
    assert parent.returncode == 1
    assert "rank 0 ended without a result: killed by SIGKILL" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_parent_leaves_no_worker(tmp_path, tiny_hf_model, signum):
    parent, worker = start_long_run(tmp_path, tiny_hf_model("llama"))
    parent.send_signal(signum)
    output, _ = parent.communicate(timeout=30)
    psutil.wait_procs([worker], timeout=20)
    assert not worker.is_running()
    assert parent.returncode not in (0, None)
    assert "Traceback" not in output


def test_python_use_without_a_main_guard(tmp_path, tiny_hf_model):
    script = tmp_path / "notebook.py"
    overrides = ["model=llama", f"model.path={tiny_hf_model('llama')}"]
    script.write_text(
        "from inferkit import OfflineInference, SamplingParams, load_config\n"
        f"llm = OfflineInference(load_config({overrides!r}))\n"
        "results = llm.generate(['Hello', 'World'], SamplingParams(temperature=0, max_tokens=4))\n"
        "print([len(result.token_ids) for result in results])\n"
    )
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [4, 4]
