"""Sweeps and ranks under a real Slurm of one node: `pytest -m slurm`.

Needs Debian's slurmctld, slurmd, slurm-client and munge, and `pip install inferkit[slurm]`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("one_node.sh")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
ARCH = (
    "{hidden_size:32,num_hidden_layers:1,num_attention_heads:2,num_key_value_heads:2,"
    "intermediate_size:64,vocab_size:300,max_position_embeddings:256}"
)
RANDOM = ["model=llama", "model.path=null", "model.with_ckpt=false", f"+model.arch={ARCH}"]
SHORT = ["data.limit=2", "data.input_truncated_len=16", "scheduler.max_new_tokens=4"]
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment of a command under Slurm."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed")
    # munge takes no socket below a folder that others may write to, and no long path.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        variables = os.environ | {"PATH": PATH, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
        subprocess.run([SCRIPT, "start", folder], env=variables, check=True)
        try:
            yield variables | {"SLURM_CONF": f"{folder}/slurm.conf"}
        finally:
            subprocess.run([SCRIPT, "stop", folder], env=variables, check=True)


def run(folder: Path, variables: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *RANDOM, *SHORT],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def results(sweep_dir: Path) -> list[dict]:
    files = sorted(sweep_dir.glob("*/result.json"), key=lambda file: int(file.parent.name))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.skipif(
    find_spec("hydra_plugins") is None
    or find_spec("hydra_plugins.hydra_submitit_launcher") is None,
    reason="needs pip install 'inferkit[slurm]'",
)
def test_cells_of_a_sweep_are_jobs(slurm, tmp_path):
    words = ["-m", "hydra/launcher=submitit_slurm", "hydra.launcher.array_parallelism=1"]
    words += ["hydra.launcher.timeout_min=10", "hydra.sweep.dir=cells"]
    axes = ["scheduler.batch_size=1,2", "parallel=tp1,dp2", "sweep.skip_invalid=true"]
    command = [sys.executable, "-m", "inferkit", *words, *axes]
    done = run(tmp_path, slurm, *command)
    assert done.returncode == 0, done.stderr
    first = results(tmp_path / "cells")
    assert [cell["status"] for cell in first] == ["ok", "invalid", "ok", "ok"]
    assert all(cell["metrics"]["num_output_tokens"] == 8 for cell in first if cell["metrics"])
    assert (tmp_path / "cells" / "summary.csv").is_file()
    jobs = sorted(path.name for path in (tmp_path / "cells" / ".submitit").glob("[0-9]*_*"))
    assert len(jobs) == 4

    again = run(tmp_path, slurm, *command)
    assert again.returncode == 0, again.stderr
    reused = results(tmp_path / "cells")
    assert [cell["seconds"] for cell in reused] == [cell["seconds"] for cell in first]


def test_tasks_of_srun_are_the_ranks_of_one_run(slurm, tmp_path):
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two tasks need two processors")
    tasks = ["srun", "--ntasks", "2", "--kill-on-bad-exit"]
    done = run(tmp_path, slurm, *tasks, sys.executable, "-m", "inferkit", "parallel=dp2")
    assert done.returncode == 0, done.stderr
    (metrics,) = tmp_path.rglob("metrics.json")
    assert json.loads(metrics.read_text())["num_output_tokens"] == 8
    assert len(list(metrics.parent.glob("rank*.log"))) == 2


def test_a_rank_that_is_refused_is_told_once(slurm, tmp_path):
    tasks = ["srun", "--ntasks", "2", "--overcommit"]
    done = run(tmp_path, slurm, *tasks, sys.executable, "-m", "inferkit", "parallel=tp4")
    assert done.returncode != 0
    assert done.stderr.count("parallel.world_size") == 1, done.stderr
    assert list(tmp_path.rglob("metrics.json")) == []
