"""Deployments of conf/experiment as real runs: the model of each shrunk, all else as committed."""

import json

import pytest

from inferkit.config.check import Checker
from inferkit.config.space import ConfigSpace
from tests.e2e.commands import finish, start

SMALL = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
"""Heads and experts stay as they are: the split is what an experiment is about."""
MOST_RANKS = 16
"""As many processes as a small machine takes; larger deployments are composed and checked only."""
NUM_RANKS_IN_CI = 2


def experiments():
    space = ConfigSpace()
    for name in space.options("experiment"):
        config = Checker(space, is_run=False).check_overrides([f"+experiment={name}"]).config
        num_ranks = config.parallel.world_size
        if num_ranks <= MOST_RANKS:
            mark = pytest.mark.multiproc if num_ranks <= NUM_RANKS_IN_CI else pytest.mark.full
            yield pytest.param(name, config, marks=mark, id=name)


@pytest.mark.parametrize(("name", "config"), list(experiments()))
def test_an_experiment_runs(tmp_path, name, config):
    sizes = [f"model.arch.{key}={SMALL[key]}" for key in SMALL if key in config.model.arch]
    words = [
        f"+experiment={name}",
        *sizes,
        "model.with_ckpt=false",
        "platform.device_memory=0",
        "data.limit=2",
        "scheduler.max_new_tokens=4",
        "hydra.run.dir=out",
    ]
    process = start(tmp_path, ["-m", "inferkit", *words])
    output = finish(process)
    assert process.returncode == 0, output
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["num_output_tokens"] == 8
    assert len(list((tmp_path / "out").glob("rank*.log"))) == config.parallel.world_size
