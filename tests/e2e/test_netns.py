"""Several nodes for real: network namespaces with addresses of their own, joined by a cable."""

import os
import subprocess
import time

import pytest

from tests.e2e.commands import (
    command,
    end_started,
    finish,
    ranks_of,
    start,
    token_ids,
    wait_until_decoding,
)

pytestmark = pytest.mark.netns
ADDRESSES = ("10.77.0.1", "10.77.0.2")
SHORT = ("data.limit=3", "scheduler.max_new_tokens=6")
LONG = ("data.limit=4", "scheduler.max_new_tokens=1500", "scheduler.fixed_steps=true")
NODES = (
    f"parallel.node_ips=[{','.join(ADDRESSES)}]",
    "parallel.devices_per_node=2",
    "parallel.master_port=29500",
)


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes():
    """Words that run a program on each of two nodes; skips where namespaces are not permitted."""
    names = [f"inferkit{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        cable = [f"ik{os.getpid()}{letter}" for letter in "ab"]
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for name, end, address in zip(names, cable, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [("ip", "netns", "exec", name) for name in names]
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
    finally:
        end_started()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start_long(directory, model, nodes, parallel):
    """A run on both nodes that would take minutes; returns its commands when all ranks decode."""
    words = command(model, *LONG, *NODES, f"parallel={parallel}", "hydra.run.dir=run")
    runs = start_on_both(directory, nodes, words)
    wait_until_decoding(runs[0], directory / "disk0" / "run" / "rank0.log")
    wait_until_decoding(runs[1], directory / "disk1" / "run" / "node1" / "rank3.log")
    return runs


def start_on_both(directory, nodes, words):
    """The same command on both nodes; each has a working directory of its own."""
    runs = []
    for number, node in enumerate(nodes):
        folder = directory / f"disk{number}"
        folder.mkdir()
        runs.append(start(folder, words, before=node))
    return runs


def test_two_nodes_generate_what_one_rank_does(tmp_path, tiny_hf_model, nodes):
    model = tiny_hf_model("llama", eos_token_id=None)
    alone = start(tmp_path, command(model, *SHORT, "hydra.run.dir=alone"))
    output = finish(alone)
    assert alone.returncode == 0, output
    words = command(model, *SHORT, *NODES, "parallel=tp4", "hydra.run.dir=run")
    runs = start_on_both(tmp_path, nodes, words)
    outputs = [finish(run) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert token_ids(tmp_path / "disk0" / "run") == token_ids(tmp_path / "alone")
    assert "the results are on node 0 (10.77.0.1)" in outputs[1]
    assert (tmp_path / "disk1" / "run" / "node1" / "rank3.log").exists()


def test_nodes_of_different_configurations_are_told(tmp_path, tiny_hf_model, nodes):
    """These would create different groups, and wait for each other for ever."""
    model = tiny_hf_model("llama", eos_token_id=None)
    runs = []
    for number, (node, parallel) in enumerate(zip(nodes, ("tp4", "dp4"), strict=True)):
        folder = tmp_path / f"disk{number}"
        folder.mkdir()
        words = command(model, *SHORT, *NODES, f"parallel={parallel}", "hydra.run.dir=run")
        runs.append(start(folder, words, before=node))
    outputs = [finish(run, 60) for run in runs]
    assert [run.returncode for run in runs] == [1, 1]
    for output in outputs:
        assert "was started with another configuration than rank 0" in output
        assert "parallel.attn_tp_size=1 (rank 0: 4)" in output and "Traceback" not in output


def test_a_rank_that_dies_ends_both_nodes(tmp_path, tiny_hf_model, nodes):
    """DP ranks exchange nothing while they decode: only the watch can tell."""
    runs = start_long(tmp_path, tiny_hf_model("llama", eos_token_id=None), nodes, "dp2tp2")
    ranks_of(runs[1])[0].kill()
    start_s = time.monotonic()
    outputs = [finish(run, 15) for run in runs]
    assert time.monotonic() - start_s < 15
    assert [run.returncode for run in runs] == [1, 1]
    assert "rank 2 ended without a result: killed by SIGKILL" in outputs[1]
    assert "rank 2 has ended, or its node cannot be reached" in outputs[0]


def test_a_node_that_vanishes_ends_the_others(tmp_path, tiny_hf_model, nodes):
    """No packet tells of it, and the ranks wait for each other in gloo."""
    runs = start_long(tmp_path, tiny_hf_model("llama", eos_token_id=None), nodes, "tp4")
    ip("-n", nodes[1][-1], "link", "set", f"ik{os.getpid()}b", "down")
    start_s = time.monotonic()
    outputs = [finish(run, 40) for run in runs]
    assert time.monotonic() - start_s < 40
    assert [run.returncode for run in runs] == [1, 1]
    for output in outputs:
        assert "has ended, or its node cannot be reached" in output
