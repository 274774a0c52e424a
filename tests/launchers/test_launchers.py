"""The scripts themselves: one real run, and what they say where something is wrong."""

import json
import os
import shlex
import socket
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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    subprocess.run(
        [Path(sys.executable).parent / "shellcheck", "--external-sources", script], check=True
    )


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


# -- prefill, decode and router --------------------------------------------------------------------


def shown_commands(script, *words, directory, **variables):
    """Role -> words after `python -m inferkit`, as DRY_RUN shows them, also where they have faults
    on this machine."""
    result = launch(script, *words, directory=directory, **variables | {"DRY_RUN": "1"})
    assert result.returncode in (0, 2), result.stderr
    commands = {}
    for line in result.stdout.splitlines():
        role, _, command = line.partition(": ")
        program, *rest = shlex.split(command)
        assert (program, rest[:2]) == (sys.executable, ["-m", "inferkit"])
        commands[role] = rest[2:]
    return commands


HERE, THERE = "127.0.0.1", "203.0.113.7"
LISTS = {"prefill": (HERE, THERE), "decode": (THERE, HERE)}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("script", ["pd_node.sh", "pd_{role}.sh"])
def test_a_node_starts_the_role_whose_list_it_is_in(tmp_path, role, script):
    words = ["parallel=tp2", "prefill:scheduler.batch_size=4", "decode:model.path=/a b"]
    variables = {"ROUTER_IP": THERE, "INFERKIT_SECRET": "s", "MASTER_PORT": "1234"}
    commands = shown_commands(
        script.format(role=role), *LISTS[role], *words, directory=tmp_path, **variables
    )
    prefill, decode = LISTS[role]
    own = {"prefill": "scheduler.batch_size=4", "decode": "model.path=/a b"}
    assert commands == {
        role: [
            f"+role={role}",
            f"disagg.prefill_ips=[{prefill}]",
            f"disagg.decode_ips=[{decode}]",
            f"disagg.router_url=http://{THERE}:8000",
            "disagg.secret_env=INFERKIT_SECRET",
            "parallel.master_port=1234",
            "parallel=tp2",
            own[role],
        ]
    }


def test_the_router_starts_on_the_first_decode_node(tmp_path):
    words = ["parallel=tp2", "model=llama", "router.retries=2", "kv_cache.block_size=16"]
    lists = (THERE, f"{HERE},203.0.113.8")
    commands = shown_commands("pd_node.sh", *lists, *words, directory=tmp_path)
    assert list(commands) == ["router", "decode"]
    assert commands["router"] == [
        "+role=router",
        f"router.host={HERE}",
        "router.port=8000",
        "router.prefill_urls=[]",
        "router.decode_urls=[]",
        "model=llama",
        "router.retries=2",
    ]
    assert commands["decode"][-3:] == ["parallel=tp2", "model=llama", "kv_cache.block_size=16"]
    assert f"disagg.router_url=http://{HERE}:8000" in commands["decode"]


def test_the_router_starts_on_another_node_where_it_is_told_to(tmp_path):
    lists = (THERE, "203.0.113.8")
    variables = {"ROUTER_IP": HERE, "ROUTER_PORT": "9000"}
    commands = shown_commands("pd_node.sh", *lists, directory=tmp_path, **variables)
    assert list(commands) == ["router"]
    assert commands["router"][1:3] == [f"router.host={HERE}", "router.port=9000"]
    alone = shown_commands("pd_router.sh", *lists, directory=tmp_path, **variables)
    assert alone == commands
    lists = (HERE, THERE)
    commands = shown_commands("pd_node.sh", *lists, directory=tmp_path, **variables)
    assert list(commands) == ["router", "prefill"]
    assert f"disagg.router_url=http://{HERE}:9000" in commands["prefill"]


@pytest.mark.parametrize("lists", [(THERE, "localhost"), ("localhost", "localhost")])
def test_a_node_is_found_by_its_name(tmp_path, lists):
    commands = shown_commands("pd_node.sh", *lists, directory=tmp_path, PD_ROLE="decode")
    assert list(commands) == ["router", "decode"]
    assert "router.host=localhost" in commands["router"]


@pytest.mark.parametrize("node_rank, roles", [("0", ["router", "decode"]), ("1", ["decode"])])
def test_a_node_rank_of_decode_says_where_the_router_is(tmp_path, node_rank, roles):
    """No address tells: the nodes are not listed by one of their own, or both are."""
    for decode in ("203.0.113.8,203.0.113.9", f"{HERE},127.0.0.2"):
        variables = {"PD_ROLE": "decode", "NODE_RANK": node_rank}
        commands = shown_commands("pd_node.sh", THERE, decode, directory=tmp_path, **variables)
        assert list(commands) == roles


def test_a_dry_run_checks_the_words(tmp_path):
    good = {"INFERKIT_SECRET": "a long secret", "DRY_RUN": "1"}
    words = [THERE, HERE, "disagg/transfer=tcp"]
    result = launch("pd_node.sh", *words, directory=tmp_path, **good)
    assert (result.returncode, result.stderr) == (0, "")
    result = launch("pd_node.sh", *words, "decode:paralel=tp2", directory=tmp_path, **good)
    assert result.returncode == 2
    assert result.stdout.startswith("router: ")
    assert result.stderr.startswith("decode: inferkit: 1 fault in the configuration")
    assert "did you mean parallel=tp2?" in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_router_has_the_secret_of_its_instances(tmp_path):
    commands = shown_commands("pd_node.sh", THERE, HERE, directory=tmp_path, INFERKIT_SECRET="s")
    for role in ("router", "decode"):
        assert "disagg.secret_env=INFERKIT_SECRET" in commands[role]


def test_a_node_in_both_lists_is_told_its_role(tmp_path):
    for role, expected in (("prefill", ["prefill"]), ("decode", ["router", "decode"])):
        commands = shown_commands("pd_node.sh", HERE, HERE, directory=tmp_path, PD_ROLE=role)
        assert list(commands) == expected


@pytest.mark.parametrize(
    "script, words, variables, message",
    [
        ("pd_node.sh", [], {}, "the lists of prefill and decode nodes are missing"),
        ("pd_prefill.sh", [HERE], {}, "the lists of prefill and decode nodes are missing"),
        ("pd_node.sh", [HERE, "parallel=tp2"], {}, "decode nodes is parallel=tp2, which is no li"),
        ("pd_node.sh", [f"{HERE},,{THERE}", THERE], {}, "prefill nodes 127.0.0.1,,203.0.113.7 has"),
        ("pd_node.sh", [f"{HERE},{HERE}", THERE], {}, "prefill nodes names 127.0.0.1 twice"),
        ("pd_node.sh", [THERE, "203.0.113.8"], {}, "none of 203.0.113.7,203.0.113.8 is an addr"),
        ("pd_node.sh", [THERE, THERE], {"NODE_RANK": "0"}, "NODE_RANK=0 is a position in one of"),
        ("pd_decode.sh", [HERE, THERE], {}, "none of the decode nodes 203.0.113.7 is an address"),
        ("pd_router.sh", [HERE, THERE], {}, "the router belongs on 203.0.113.7, which is no addr"),
        ("pd_node.sh", [HERE, HERE], {}, "this node is in both lists (127.0.0.1, 127.0.0.1); set"),
        ("pd_node.sh", [HERE, THERE], {"PD_ROLE": "router"}, "PD_ROLE=router is no role of a nod"),
        ("pd_node.sh", [HERE, THERE], {"PD_ROLE": "decode"}, "none of the decode nodes 203.0.113"),
        ("pd_node.sh", [HERE, THERE], {"PYTHON": "no-such-python"}, "no interpreter no-such-pytho"),
        ("pd_node.sh", [HERE, THERE], {"PYTHON": "/bin/false"}, "/bin/false cannot import inferk"),
        ("pd_node.sh", [HERE, THERE, "router.port=9"], {}, "router.port=9 would hide the router"),
    ],
)
def test_a_pd_script_says_what_is_wrong(tmp_path, script, words, variables, message):
    result = launch(script, *words, directory=tmp_path, **variables | {"DRY_RUN": "1"})
    assert result.returncode == 2 and not result.stdout
    assert message in result.stderr
    assert result.stderr.startswith(f"{script}: ")


def test_a_port_in_use_is_found_before_the_start(tmp_path):
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        words = [HERE, THERE, "disagg.http_port=0", f"prefill:disagg.bootstrap_port={port}"]
        result = launch("pd_node.sh", *words, directory=tmp_path)
    assert result.returncode == 2
    assert f"port {port} is in use on this node" in result.stderr
    assert "with disagg.bootstrap_port=..." in result.stderr


def test_a_node_rank_speaks_for_a_node_without_a_listed_address(tmp_path):
    commands = shown_commands("pd_decode.sh", HERE, THERE, directory=tmp_path, NODE_RANK="0")
    assert list(commands) == ["decode"]


def test_one_host_is_a_cluster(tmp_path, shown):
    words = ("cluster.prefill=2", "parallel=tp2")
    result = launch("pd_single_host.sh", *words, directory=tmp_path, PYTHON=shown)
    assert result.stdout.splitlines()[1:] == ["-m", "inferkit", "+role=cluster", *words]


def test_one_host_shows_its_command_where_it_is_asked_to(tmp_path, shown):
    words = {"PYTHON": shown, "DRY_RUN": "1"}
    result = launch("pd_single_host.sh", "parallel=tp2", directory=tmp_path, **words)
    assert result.stdout == f"{shown} -m inferkit +role=cluster parallel=tp2\n"
