import os

import psutil
import pytest

from inferkit.core.errors import WorkerError
from inferkit.runtime.worker_group import run_workers
from tests.worker_entrypoints import fail_as_programmer, fail_as_user, greet, kill_itself


def test_events_arrive_and_output_goes_to_files(tmp_path):
    events = []
    run_workers(greet, [(0, "a"), (1, "b")], log_dir=tmp_path, on_event=events.append)
    texts = {event["rank"]: event["text"] for event in events}
    assert texts == {0: "hello a", 1: "hello b"}
    assert (tmp_path / "rank1.stdout.log").read_text() == "stdout of 1\n"


def test_a_users_error_comes_as_its_message_alone(tmp_path):
    with pytest.raises(WorkerError) as caught:
        run_workers(fail_as_user, [()], log_dir=tmp_path, on_event=print)
    assert str(caught.value) == "model.path=/x is not there"


def test_another_error_comes_with_its_traceback(tmp_path):
    with pytest.raises(WorkerError, match="ZeroDivisionError: one over nothing") as caught:
        run_workers(fail_as_programmer, [()], log_dir=tmp_path, on_event=print)
    assert "worker_entrypoints.py" in str(caught.value)


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path):
    events = []
    with pytest.raises(WorkerError, match=r"rank 1 ended without a result: killed by SIGKILL"):
        run_workers(kill_itself, [(0,), (1,)], log_dir=tmp_path, on_event=events.append)
    for event in events:
        assert not psutil.pid_exists(event["pid"])
    commands = [" ".join(child.cmdline()) for child in psutil.Process(os.getpid()).children()]
    assert not [command for command in commands if "spawn_main" in command]
