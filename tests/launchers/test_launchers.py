"""The scripts themselves: one real run, and what they say where something is wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inferkit.core.place import LOOPBACK
from inferkit.runtime.place import local_addresses
from tests.e2e.commands import environment

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
SCRIPTS = sorted(LAUNCHERS.glob("*.sh"))


def launch(script, *words, directory, **variables):
    return subprocess.run(
        [LAUNCHERS / script, *words],
        cwd=directory,
        env=environment(PYTHON=sys.executable) | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def shown(tmp_path):
    """A PYTHON that shows its arguments and NODE_RANK instead of running anything."""
    program = tmp_path / "show"
    program.write_text('#!/bin/sh\necho "node $NODE_RANK"\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_executable_and_plain_sh(script):
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/bin/sh\n")
    subprocess.run(["sh", "-n", script], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    subprocess.run(["shellcheck", script], check=True)


def test_the_single_node_script_runs(tmp_path, tiny_hf_model):
    result = launch(
        "offline_single_node.sh",
        "model=llama",
        f"model.path={tiny_hf_model('llama')}",
        "data.limit=1",
        "scheduler.max_new_tokens=2",
        "hydra.run.dir=a folder",
        directory=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "a folder" / "result.json").read_text())["status"] == "ok"


def test_the_multi_node_script_passes_on_what_it_found(tmp_path, shown):
    words = ("10.0.0.1,10.0.0.2", "parallel=tp2", "data.prompt=two words")
    variables = {"PYTHON": shown, "NODE_RANK": "1", "MASTER_PORT": "1234"}
    result = launch("offline_multi_node.sh", *words, directory=tmp_path, **variables)
    assert result.stdout.splitlines() == [
        "node 1",
        "-m",
        "inferkit",
        "parallel.node_ips=[10.0.0.1,10.0.0.2]",
        "parallel.master_port=1234",
        "parallel=tp2",
        "data.prompt=two words",
    ]


def test_the_multi_node_script_finds_its_place_by_address(tmp_path, shown):
    others = sorted(local_addresses() - {LOOPBACK})
    if not others:
        pytest.skip("this machine has the loopback address only")
    nodes = f"10.255.255.1,{others[0]}"
    result = launch("offline_multi_node.sh", nodes, directory=tmp_path, PYTHON=shown)
    assert result.stdout.startswith("node 1\n"), result.stderr


@pytest.mark.parametrize(
    "words, node_rank, message",
    [
        ([], "", "the list of nodes is missing"),
        (["parallel=tp2"], "", "the first word is parallel=tp2, but must be the list of nodes"),
        (["10.0.0.1"], "", "names 10.0.0.1 alone; for one node use offline_single_node.sh"),
        (["10.0.0.1,,10.0.0.2"], "", "has an empty place"),
        (["10.0.0.1,10.0.0.2,10.0.0.1"], "", "names 10.0.0.1 twice"),
        (["10.0.0.1,10.0.0.2"], "first", "NODE_RANK=first is no number; use 0 to 1"),
        (["10.0.0.1,10.0.0.2"], "2", "NODE_RANK=2 is too big for 2 nodes; use 0 to 1"),
        (["203.0.113.1,203.0.113.2"], "", "none of 203.0.113.1,203.0.113.2 is an address of this"),
    ],
)
def test_the_multi_node_script_says_what_is_wrong(tmp_path, shown, words, node_rank, message):
    variables = {"PYTHON": shown, "NODE_RANK": node_rank}
    result = launch("offline_multi_node.sh", *words, directory=tmp_path, **variables)
    assert result.returncode == 2 and not result.stdout
    assert message in result.stderr
    assert result.stderr.startswith("offline_multi_node.sh: ")
