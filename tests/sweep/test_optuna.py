"""A sweep that searches, by the plugin that the extra `optuna` brings."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(
        find_spec("hydra_plugins") is None
        or find_spec("hydra_plugins.hydra_optuna_sweeper") is None,
        reason="needs pip install 'inferkit[optuna]'",
    ),
]

ROOT = Path(__file__).resolve().parents[2]
ARCH = (
    "{hidden_size:32,num_hidden_layers:1,num_attention_heads:2,num_key_value_heads:2,"
    "intermediate_size:64,vocab_size:300,max_position_embeddings:256}"
)
RANDOM = ["model=llama", "model.path=null", "model.with_ckpt=false", f"+model.arch={ARCH}"]
SHORT = ["data.limit=2", "data.input_truncated_len=16", "scheduler.max_new_tokens=4"]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return start(folder, *words, *RANDOM, *SHORT)


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inferkit", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def resume(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return start(folder, "resume", *words)


@pytest.mark.timeout(300)
def test_a_search_goes_on_after_a_trial_without_a_result(tmp_path):
    """The seed tries both batches; one of them does not go with two data-parallel ranks."""
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    search += ["hydra.sweeper.direction=maximize", "hydra.sweeper.sampler.seed=1"]
    axes = ["scheduler.batch_size=choice(1,2)", "parallel=dp2", "sweep.skip_invalid=true"]
    done = run(tmp_path, "-m", *search, *axes, "hydra.sweep.dir=found")
    assert done.returncode == 0, done.stderr
    results = [
        json.loads(file.read_text()) for file in sorted((tmp_path / "found").glob("*/result.json"))
    ]
    assert [result["number"] for result in results] == [0, 1, 2]
    assert {result["status"] for result in results} == {"ok", "invalid"}
    best = yaml.safe_load((tmp_path / "found" / "optimization_results.yaml").read_text())
    assert best["best_params"] == {"scheduler.batch_size": 2}
    values = [r["metrics"]["output_tokens_per_s"] for r in results if r["status"] == "ok"]
    assert best["best_value"] == max(values)
    assert "1 of 2 edges of the search cannot run" in done.stderr
    assert (tmp_path / "found" / "summary.csv").is_file()


@pytest.mark.timeout(300)
def test_a_search_that_is_resumed_loses_nothing(tmp_path):
    """Equal values run once; a finished search is not run again, one with more trials anew."""
    search = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.direction=maximize",
    ]
    done = run(tmp_path, "-m", *search, "scheduler.batch_size=choice(2)", "hydra.sweep.dir=found")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("these values have run before") == 2
    found = sorted((tmp_path / "found").glob("*/result.json"))
    assert [json.loads(file.read_text())["number"] for file in found] == [0, 1, 2]
    table = (tmp_path / "found" / "summary.csv").read_text().splitlines()
    assert table[0].startswith("cell,scheduler.batch_size,status")
    assert [line.split(",")[:3] for line in table[1:]] == [[n, "2", "ok"] for n in "012"]
    assert "[scheduler.batch_size=2]" in done.stdout
    before = [file.stat().st_mtime_ns for file in found]

    done = resume(tmp_path, "found")
    assert done.returncode == 0, done.stderr
    assert "is finished and nothing of it has changed: nothing is run" in done.stderr
    assert [file.stat().st_mtime_ns for file in found] == before

    done = resume(tmp_path, "found", "hydra.sweeper.n_trials=1", "scheduler.batch_size=choice(1)")
    assert done.returncode == 0, done.stderr
    assert "the search begins anew: 3 earlier trials are in" in done.stderr
    earlier = sorted(path.name for path in (tmp_path / "found" / "earlier").iterdir())
    assert earlier == ["0-1", "1-1", "2-1", "optimization_results.yaml-1"]

    done = resume(tmp_path, "found", "scheduler.batch_size=choice(2)")
    assert "cell #0 ok: these values have run before" in done.stderr, done.stderr
    earlier = sorted(path.name for path in (tmp_path / "found" / "earlier").glob("[0-9]*"))
    assert earlier == ["0-2", "1-1", "2-1"]


def test_nothing_is_started_where_an_edge_of_the_search_cannot_run(tmp_path):
    search = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize"]
    axes = ["scheduler.batch_size=int(interval(1,64))", "kv_cache.mem_fraction=interval(0.5,1.5)"]
    done = run(tmp_path, "-m", *search, *axes)
    assert done.returncode == 2 and list(tmp_path.iterdir()) == []
    assert "2 of 4 edges of the search cannot run; nothing was started" in done.stderr
    assert "kv_cache.mem_fraction=1.5: is out of range" in done.stderr
