"""What rank processes run in the tests of worker groups. Torch-free, so that they start fast."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

from inferkit.core.errors import ModelLoadError

PEER_LOSS = (
    "[/__w/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:32181. This is typically caused by a remote worker crashing."
)


def greet(rank: int, name: str, *, channel: Any) -> None:
    print(f"stdout of {rank}")
    channel.send({"event": "greeting", "rank": rank, "text": f"hello {name}", "pid": os.getpid()})


def describe_process(*, channel: Any) -> None:
    channel.send(
        {
            "event": "process",
            "path": list(sys.path),
            "variables": dict(os.environ),
            "cwd": os.getcwd(),
        }
    )


def fail_as_user(*, channel: Any) -> None:
    raise ModelLoadError("model.path=/x is not there")


def fail_as_programmer(*, channel: Any) -> None:
    raise ZeroDivisionError("one over nothing")


def kill_itself(rank: int, *, channel: Any) -> None:
    """Rank 1 is killed while the others wait."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    channel.send({"event": "pid", "pid": os.getpid()})
    time.sleep(600)


def lose_a_killed_peer(rank: int, *, channel: Any) -> None:
    """The others report the loss of rank 2 before its end can be seen."""
    if rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(PEER_LOSS)


def lose_a_failed_peer(rank: int, *, channel: Any) -> None:
    """The others report the loss of rank 2 before its own error arrives."""
    if rank == 2:
        time.sleep(0.5)
        raise ModelLoadError("model.path=/x is not there")
    raise RuntimeError(PEER_LOSS)


def lose_a_far_peer(*, channel: Any) -> None:
    raise RuntimeError(PEER_LOSS)


def fail_and_stay(*, channel: Any) -> None:
    """The error is told, but something keeps the process from its end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel.send(
        {
            "event": "error",
            "message": "broken",
            "type": "ValueError",
            "is_user_error": True,
            "is_peer_loss": False,
            "traceback": "",
        }
    )
    time.sleep(600)


def send_much(rank: int, num_bytes: int, *, channel: Any) -> None:
    """Messages of several ranks at once, none of which fits a pipe's buffer."""
    for _ in range(20):
        channel.send({"event": "much", "rank": rank, "payload": bytes([rank]) * num_bytes})


def wait_for_ever(*, channel: Any) -> None:
    channel.send({"event": "pid", "pid": os.getpid()})
    time.sleep(600)


def print_raw(command: str, *, channel: Any) -> None:
    """What a child process of this rank writes, and a library in C."""
    subprocess.run(["sh", "-c", command], check=True)
    os.write(2, b"raw " + os.environ["MY_API_KEY"].encode() + b" without an end")


def leave_a_child(*, channel: Any) -> None:
    """A child that outlives the run and holds what it inherited."""
    child = subprocess.Popen(["sh", "-c", "echo early; exec sleep 600"], start_new_session=True)
    channel.send({"event": "child", "pid": child.pid})
    time.sleep(0.5)
