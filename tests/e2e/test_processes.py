"""Runs of several ranks: how they start, meet and end, whoever starts them."""

import json
import os
import re
import signal
import time

import psutil
import pytest

from inferkit.core.listening import reserved
from inferkit.core.place import LOOPBACK
from inferkit.runtime.place import local_addresses
from tests.e2e.commands import (
    assert_ended,
    command,
    end_started,
    finish,
    ranks_of,
    start,
    token_ids,
    wait_until_decoding,
)

SHORT = ("data.limit=3", "scheduler.max_new_tokens=6")
LONG = (
    "data.limit=1",
    "scheduler.max_new_tokens=1500",
    "scheduler.fixed_steps=true",
    "kv_cache.block_size=1",
)
"""Would take minutes."""


@pytest.fixture
def model(tiny_hf_model):
    return tiny_hf_model("llama", eos_token_id=None)


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    end_started()


@pytest.fixture(scope="module")
def expected(tiny_hf_model, tmp_path_factory):
    """Token ids of one rank."""
    directory = tmp_path_factory.mktemp("alone")
    model = tiny_hf_model("llama", eos_token_id=None)
    run = start(directory, command(model, *SHORT, "hydra.run.dir=run"))
    output = finish(run)
    assert run.returncode == 0, output
    return token_ids(directory / "run")


def start_four(directory, model, *overrides):
    """A long run of four ranks, which are generating; returns it and its ranks."""
    run = start(directory, command(model, *LONG, "parallel=tp4", "hydra.run.dir=run", *overrides))
    for rank in range(4):
        wait_until_decoding(run, directory / "run" / f"rank{rank}.log")
    ranks = ranks_of(run)
    assert len(ranks) == 4
    return run, ranks


@pytest.mark.multiproc
def test_four_ranks_generate_what_one_does_and_leave_one_result(tmp_path, model, expected):
    run = start(tmp_path, command(model, *SHORT, "parallel=tp4", "hydra.run.dir=run"))
    output = finish(run)
    assert run.returncode == 0, output
    assert output.count("run directory:") == 1
    assert token_ids(tmp_path / "run") == expected
    assert not list((tmp_path / "run").glob("generations.rank*"))
    for rank in range(4):
        log = (tmp_path / "run" / f"rank{rank}.log").read_text()
        assert f"[rank{rank}]" in log and "kind=decode" in log
        assert (tmp_path / "run" / "workers" / f"rank{rank}.stderr.log").exists()


@pytest.mark.multiproc
def test_a_killed_rank_ends_the_run_within_ten_seconds(tmp_path, model):
    run, ranks = start_four(tmp_path, model)
    everybody = psutil.Process(run.pid).children(recursive=True)
    # What is sent to the command's process group does not reach its ranks.
    assert os.getsid(run.pid) not in {os.getsid(rank.pid) for rank in ranks}
    ranks[2].kill()
    output = finish(run, 10)
    assert run.returncode == 1
    assert "rank 2 ended without a result: killed by SIGKILL" in output
    assert "Traceback" not in output
    assert_ended(everybody)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "failed" and "rank 2 ended" in result["error"]


@pytest.mark.multiproc
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ranks_end_with_their_command(tmp_path, model, signum):
    run, _ = start_four(tmp_path, model)
    everybody = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signum)
    output = finish(run, 20)
    assert run.returncode not in (0, None)
    assert "Traceback" not in output
    assert_ended(everybody)


@pytest.mark.multiproc
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_was_finished(tmp_path, model, signum):
    """Each DP rank has one request at a time and writes the finished ones itself."""
    words = ("data.limit=16", "scheduler.max_new_tokens=100", "scheduler.batch_size=2")
    run = start(tmp_path, command(model, *words, "parallel=dp2", "hydra.run.dir=run"))
    parts = [tmp_path / "run" / f"generations.rank{rank}.jsonl" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(part.exists() and "\n" in part.read_text() for part in parts):
        assert run.poll() is None, run.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.send_signal(signum)
    output = finish(run, 10)
    lines = (tmp_path / "run" / "generations.jsonl").read_text().splitlines()
    numbers = [json.loads(line)["request_id"] for line in lines]
    assert numbers[:2] == [0, 1] and numbers == sorted(set(numbers)) and len(numbers) < 16
    assert {json.loads(line)["finish_reason"] for line in lines} <= {"length", "stop"}
    assert f"generations that were finished are kept: {len(lines)}, in " in output
    assert run.returncode == (130 if signum == signal.SIGINT else 143)
    assert not any(part.exists() for part in parts)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["error"]) == ("interrupted", f"ended by {signum.name}")


@pytest.mark.multiproc
def test_a_rank_that_stops_for_want_of_memory_is_named(tmp_path, model):
    """The first cause wins: the other ranks only lose their peer."""
    run, ranks = start_four(tmp_path, model)
    ranks[1].send_signal(signal.SIGSEGV)
    output = finish(run, 10)
    assert "rank 1 ended without a result: killed by SIGSEGV" in output


def launched(directory, words, place, **variables):
    """Start a rank as torchrun does, without torchrun."""
    rank, world_size, port = place
    variables |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }
    return start(directory, words, **variables)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["parallel=tp4"], "torchrun has started 2 processes, but parallel.world_size=4"),
        (["-m", "parallel=tp1,tp2"], "a sweep starts the ranks of every cell itself"),
        (["parallel=tp3"], "parallel=tp3"),
    ],
)
def test_under_torchrun_rank_0_tells_what_cannot_run(tmp_path, model, overrides, message):
    run = launched(tmp_path, command(model, *overrides), (0, 2, 1))
    output = finish(run)
    assert run.returncode == 2
    assert message in output and "Traceback" not in output
    assert not (tmp_path / "outputs").exists()


@pytest.mark.multiproc
def test_under_torchrun_the_processes_are_the_ranks(tmp_path, model, expected):
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    words = command(model, *SHORT, "parallel=tp2")
    run = start(tmp_path, ["-m", *torchrun, *words])
    output = finish(run)
    assert run.returncode == 0, output
    assert output.count("run directory:") == 1
    (run_dir,) = (tmp_path / "outputs").glob("*/*")
    assert token_ids(run_dir) == expected
    names = {path.name for path in run_dir.iterdir()}
    assert {"rank0.log", "rank1.log", "metrics.json", "result.json", "provenance.json"} <= names
    assert "workers" not in names


@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_rank_0_alone_tells_what_a_check_found(tmp_path, model, rank):
    words = command(model, "parallel=tp2")
    words.insert(2, "check")
    run = launched(tmp_path, words, (rank, 2, 1))
    output = finish(run)
    assert run.returncode == 0, output
    assert output.startswith("ok: ") if rank == 0 else output == ""


@pytest.mark.multiproc
def test_ranks_end_with_a_killed_torchrun(tmp_path, model):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    words = command(model, *LONG, "parallel=tp2", "hydra.run.dir=run")
    run = start(tmp_path, [*torchrun, *words])
    for rank in range(2):
        wait_until_decoding(run, tmp_path / "run" / f"rank{rank}.log")
    everybody = psutil.Process(run.pid).children(recursive=True)
    assert len([child for child in everybody if "inferkit" in child.cmdline()]) == 2
    run.kill()
    _, alive = psutil.wait_procs(everybody, timeout=10)
    for process in alive:
        process.kill()
    assert not alive
    assert "inferkit: torchrun was killed, and its ranks end with it" in finish(run)


@pytest.mark.multiproc
def test_under_srun_the_tasks_are_the_ranks(tmp_path, model, expected):
    runs = []
    with reserved("", 0) as port:
        words = command(
            model, *SHORT, "parallel=tp2", "hydra.run.dir=run", f"parallel.master_port={port}"
        )
        for rank in range(2):
            variables = {
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_NTASKS": "2",
                "SLURM_JOB_NODELIST": "localhost",
            }
            runs.append(start(tmp_path, words, **variables))
        outputs = [finish(run) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert "run directory:" in outputs[0] and "run directory:" not in outputs[1]
    assert token_ids(tmp_path / "run") == expected


@pytest.mark.multiproc
def test_a_launched_rank_that_loses_another_says_so(tmp_path, model):
    words = command(model, *LONG, "parallel=tp2", "hydra.run.dir=run")
    with reserved("", 0) as port:
        runs = [launched(tmp_path, words, (rank, 2, port)) for rank in range(2)]
        for rank in range(2):
            wait_until_decoding(runs[rank], tmp_path / "run" / f"rank{rank}.log")
        runs[1].kill()
        output = finish(runs[0], 10)
        finish(runs[1])
    assert runs[0].returncode == 1
    assert "rank 1 has ended, or its node cannot be reached" in output
    assert "Traceback" not in output


def two_nodes(port):
    """Overrides of a run on two nodes, both of them this machine by different addresses."""
    others = sorted(local_addresses() - {LOOPBACK})
    if not others:
        pytest.skip("this machine has one address only")
    return (
        "parallel=tp4",
        f"parallel.node_ips=[{LOOPBACK},{others[0]}]",
        "parallel.devices_per_node=2",
        f"parallel.master_port={port}",
    )


@pytest.mark.multiproc
def test_two_nodes_generate_together(tmp_path, model, expected):
    with reserved("", 0) as port:
        words = command(model, *SHORT, *two_nodes(port), "hydra.run.dir=run")
        runs = [start(tmp_path, words, NODE_RANK=str(rank)) for rank in range(2)]
        outputs = [finish(run) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert token_ids(tmp_path / "run") == expected
    assert "run directory:" in outputs[0] and "run directory:" not in outputs[1]
    assert "node 1 has finished; the results are on node 0 (127.0.0.1)" in outputs[1]
    assert (tmp_path / "run" / "rank1.log").exists()
    other = {path.name for path in (tmp_path / "run" / "node1").iterdir()}
    assert {"rank2.log", "rank3.log", "result.json", "workers"} <= other
    assert "generations.jsonl" not in other


@pytest.mark.multiproc
def test_a_rank_that_dies_on_one_node_ends_the_other(tmp_path, model):
    with reserved("", 0) as port:
        words = command(model, *LONG, *two_nodes(port), "hydra.run.dir=run")
        runs = [start(tmp_path, words, NODE_RANK=str(rank)) for rank in range(2)]
        wait_until_decoding(runs[0], tmp_path / "run" / "rank0.log")
        ranks_of(runs[1])[1].kill()
        start_s = time.monotonic()
        outputs = [finish(run, 15) for run in runs]
        assert time.monotonic() - start_s < 15
    assert [run.returncode for run in runs] == [1, 1]
    assert "rank 3 ended without a result: killed by SIGKILL" in outputs[1]
    assert "rank 3 has ended, or its node cannot be reached" in outputs[0]
    assert "Traceback" not in outputs[0] + outputs[1]


def test_a_machine_that_is_no_node_makes_no_folder(tmp_path, model):
    nodes = (
        "parallel=tp2",
        "parallel.node_ips=[203.0.113.1,203.0.113.2]",
        "parallel.devices_per_node=1",
        "parallel.master_port=29500",
    )
    run = start(tmp_path, command(model, *nodes))
    output = finish(run)
    assert run.returncode == 2
    assert "none of parallel.node_ips=[203.0.113.1,203.0.113.2] is an address" in output
    assert not (tmp_path / "outputs").exists()


API_PROGRAM = """
import json, sys
from inferkit import OfflineInference, SamplingParams, load_config

llm = OfflineInference(load_config(sys.argv[1:]))
results = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0, max_tokens=5))
ids = json.dumps([result.token_ids for result in results])
sys.stdout.write(f"ids {llm.parts.comm.rank} {ids} ")  # one call: ranks share the terminal
"""


@pytest.mark.multiproc
def test_the_python_interface_joins_the_ranks_of_torchrun(tmp_path, model):
    program = tmp_path / "program.py"
    program.write_text(API_PROGRAM)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    overrides = ["model=llama", f"model.path={model}", "model.dtype=float32"]
    lines = {}
    for split, launcher in (("tp1", []), ("tp2", torchrun)):
        run = start(tmp_path, [*launcher, str(program), *overrides, f"parallel={split}"])
        output = finish(run)
        assert run.returncode == 0, output
        found = re.findall(r"ids (\d) (\[\[.*?\]\])", output)
        lines[split] = {int(rank): ids for rank, ids in found}
    # Every rank returns all results, those of one rank.
    assert lines["tp2"] == {0: lines["tp1"][0], 1: lines["tp1"][0]}
