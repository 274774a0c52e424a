import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from inferkit.config.preflight import MAX_RANKS_PER_NODE
from inferkit.core.errors import WorkerError
from inferkit.runtime.worker_group import run_workers

ROOT = Path(__file__).resolve().parents[2]


def run(entrypoint, rank_args, tmp_path, on_event=print):
    name = f"tests.worker_entrypoints:{entrypoint}"
    run_workers(name, rank_args, log_dir=tmp_path, on_event=on_event)


def forked():
    """Children of this process's fork servers; ranks of other tests (tests/ranks.py) among them."""
    return {
        child
        for child in psutil.Process(os.getpid()).children(recursive=True)
        if child.parent().pid != os.getpid() and "forkserver" in " ".join(child.cmdline())
    }


@pytest.fixture(autouse=True)
def others(monkeypatch):
    monkeypatch.setitem(globals(), "OTHERS", forked())


OTHERS = frozenset()


def ranks_alive():
    """Those of the current test."""
    return forked() - OTHERS


def test_events_arrive_and_output_goes_to_files(tmp_path):
    events = []
    run("greet", {4: (4, "a"), 5: (5, "b")}, tmp_path, events.append)
    texts = {event["rank"]: event["text"] for event in events}
    assert texts == {4: "hello a", 5: "hello b"}
    assert (tmp_path / "rank5.stdout.log").read_text() == "stdout of 5\n"
    assert not ranks_alive()


def test_as_many_ranks_start_as_the_pre_flight_allows(tmp_path):
    """A new process is handed no more than 256 descriptors: few of every rank."""
    events = []
    run("greet", {rank: (rank, "a") for rank in range(MAX_RANKS_PER_NODE)}, tmp_path, events.append)
    assert sorted(event["rank"] for event in events) == list(range(MAX_RANKS_PER_NODE))


def test_secrets_are_hidden_in_what_children_of_a_rank_write(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "marker-6")
    run("print_raw", {0: ('echo "key $MY_API_KEY"; echo "$MY_API_KEY" >/dev/stderr',)}, tmp_path)

    assert (tmp_path / "rank0.stdout.log").read_text() == "key <secret MY_API_KEY>\n"
    assert (tmp_path / "rank0.stderr.log").read_text() == (
        "<secret MY_API_KEY>\nraw <secret MY_API_KEY> without an end"
    )


def test_a_run_ends_though_a_child_of_a_rank_lives_on(tmp_path):
    events = []
    run("leave_a_child", {0: ()}, tmp_path, events.append)
    (event,) = events
    os.kill(event["pid"], signal.SIGKILL)

    assert (tmp_path / "rank0.stdout.log").read_text() == "early\n"


def test_a_rank_has_the_parents_import_path_and_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("INFERKIT_TEST", "of this run")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    events = []
    run("describe_process", {0: ()}, tmp_path, events.append)
    (event,) = events
    assert event["variables"]["INFERKIT_TEST"] == "of this run"
    assert "PYTHONPATH" not in event["variables"] and "PYTHONSAFEPATH" not in event["variables"]
    assert event["cwd"] == str(tmp_path)
    assert event["variables"]["TORCHELASTIC_ERROR_FILE"].startswith(str(tmp_path))


def test_a_file_in_the_working_directory_is_not_imported_instead(tmp_path):
    """As it is for the console script: its import path does not begin where it is started."""
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    code = (
        "import sys; from pathlib import Path; del sys.path[0]\n"
        "from inferkit.runtime.worker_group import run_workers\n"
        "name = 'tests.worker_entrypoints:greet'\n"
        "run_workers(name, {0: (0, 'a')}, log_dir=Path('logs'), on_event=print)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "hello a" in result.stdout and not result.stderr


def test_ranks_end_with_a_killed_parent_and_leave_no_folder(tmp_path):
    folder = tempfile.TemporaryDirectory(prefix="t-")  # short, as paths of sockets must be
    code = (
        "from pathlib import Path\n"
        "from inferkit.runtime.worker_group import run_workers\n"
        "args = {rank: () for rank in range(4)}\n"
        "run_workers('tests.worker_entrypoints:wait_for_ever', args, log_dir=Path('logs'),\n"
        "            on_event=lambda event: print(event['pid'], flush=True))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": folder.name},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        ranks = [psutil.Process(int(parent.stdout.readline())) for _ in range(4)]
        everybody = psutil.Process(parent.pid).children(recursive=True)
        assert list(Path(folder.name).glob("pymp-*/listener-*"))
        parent.kill()
    _, alive = psutil.wait_procs([*ranks, *everybody], timeout=10)
    assert not alive
    assert not list(Path(folder.name).glob("pymp-*"))
    folder.cleanup()


SLOW_MODULE = """
import time
from pathlib import Path

Path("begun").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("phase", ["this process imports", "the fork server imports"])
def test_a_signal_is_heard_while_ranks_are_being_started(tmp_path, phase):
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    code = (
        "from pathlib import Path\n"
        "from inferkit.runtime.worker_group import run_workers\n"
        "print('begins', flush=True)\n"
        "run_workers('slow_module:function', {0: (), 1: ()}, log_dir=Path('logs'),\n"
        "            on_event=print)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout.readline() == "begins\n"
        while phase.startswith("the fork") and not (tmp_path / "begun").exists():
            time.sleep(0.05)
        time.sleep(0.5)
        everybody = psutil.Process(parent.pid).children(recursive=True)
        start_s = time.monotonic()
        parent.send_signal(signal.SIGTERM)
        _, errors = parent.communicate(timeout=60)
        duration_s = time.monotonic() - start_s
    _, alive = psutil.wait_procs(everybody, timeout=5)
    assert everybody and not alive
    assert (parent.returncode, errors) == (128 + signal.SIGTERM, "")
    assert duration_s < 5  # well below a second on a machine that does nothing else


def test_messages_of_several_ranks_do_not_mix(tmp_path):
    events = []
    size = 300_000
    run("send_much", {rank: (rank, size) for rank in range(3)}, tmp_path, events.append)
    assert len(events) == 60
    assert all(event["payload"] == bytes([event["rank"]]) * size for event in events)


def test_a_users_error_comes_as_its_message_alone(tmp_path):
    with pytest.raises(WorkerError) as caught:
        run("fail_as_user", {0: ()}, tmp_path)
    assert str(caught.value) == "model.path=/x is not there"


def test_among_several_ranks_an_error_names_its_rank(tmp_path):
    with pytest.raises(WorkerError, match=r"^rank [01]: model.path=/x is not there$"):
        run("fail_as_user", {0: (), 1: ()}, tmp_path)


def test_another_error_comes_with_its_place_and_the_log_of_its_traceback(tmp_path):
    with pytest.raises(WorkerError) as caught:
        run("fail_as_programmer", {0: ()}, tmp_path)
    first, second, third = str(caught.value).splitlines()
    assert first == "ZeroDivisionError: one over nothing"
    assert re.search(r"^  at \S*worker_entrypoints\.py:\d+ in fail_as_programmer$", second)
    log = re.fullmatch(r"  the whole traceback is in (\S+)", third)[1]
    assert "Traceback" in Path(log).read_text()
    assert "Traceback" in caught.value.__notes__[0]  # for the log of this process


def test_an_entrypoint_that_cannot_be_imported_is_an_error(tmp_path):
    with pytest.raises(WorkerError, match="no_such_function"):
        run("no_such_function", {0: ()}, tmp_path)


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path):
    events = []
    with pytest.raises(WorkerError, match=r"rank 1 ended without a result: killed by SIGKILL"):
        run("kill_itself", {rank: (rank,) for rank in range(4)}, tmp_path, events.append)
    assert not ranks_alive()


def test_who_lost_a_killed_rank_is_not_the_cause(tmp_path):
    with pytest.raises(WorkerError, match="rank 2 ended without a result: killed by SIGKILL"):
        run("lose_a_killed_peer", {rank: (rank,) for rank in range(4)}, tmp_path)


def test_who_lost_a_failed_rank_is_not_the_cause(tmp_path):
    with pytest.raises(WorkerError, match=r"^rank 2: model.path=/x is not there$"):
        run("lose_a_failed_peer", {rank: (rank,) for rank in range(4)}, tmp_path)


def test_a_rank_that_lost_one_of_another_node_says_so(tmp_path):
    with pytest.raises(WorkerError, match="rank 3 lost the connection to another rank") as caught:
        run("lose_a_far_peer", {3: ()}, tmp_path)
    assert "Connection closed by peer" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_ranks_end_with_the_fork_server_and_the_next_run_has_a_new_one(tmp_path):
    pids = []

    def kill_fork_server(event):
        pids.append(event["pid"])
        os.kill(psutil.Process(event["pid"]).ppid(), signal.SIGKILL)

    with pytest.raises(WorkerError, match="rank 0 ended without a result"):
        run("wait_for_ever", {0: ()}, tmp_path, kill_fork_server)
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    assert not psutil.pid_exists(pids[0])
    events = []
    run("greet", {0: (0, "again")}, tmp_path, events.append)
    assert [event["text"] for event in events] == ["hello again"]


@pytest.mark.parametrize(
    "signum, error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_ends_the_ranks(tmp_path, signum, error):
    before = signal.getsignal(signum)
    with pytest.raises(error):
        run("wait_for_ever", {0: (), 1: ()}, tmp_path, lambda event: os.kill(os.getpid(), signum))
    assert not ranks_alive()
    assert signal.getsignal(signum) is before


def test_a_signal_that_is_ignored_ends_nothing(tmp_path):
    """A run under nohup outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        events = []
        run("greet", {0: (0, "a")}, tmp_path, lambda event: os.kill(os.getpid(), signal.SIGHUP))
        run("greet", {0: (0, "a")}, tmp_path, events.append)
        assert len(events) == 1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_of_the_parents_own_ends_the_ranks(tmp_path):
    def fail(event):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        run("wait_for_ever", {0: (), 1: ()}, tmp_path, fail)
    assert not ranks_alive()


def test_a_failed_rank_that_does_not_exit_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("inferkit.runtime.worker_group.END_GRACE_S", 0.5)
    start_s = time.monotonic()
    with pytest.raises(WorkerError, match="rank 0: broken|rank 1: broken"):
        run("fail_and_stay", {0: (), 1: ()}, tmp_path)
    assert time.monotonic() - start_s < 25
    assert not ranks_alive()
