"""What worker processes run in the tests of worker groups."""

import os
import signal
import time
from typing import Any

from inferkit.core.errors import ModelLoadError
from inferkit.runtime.worker_group import reporting


def greet(rank: int, name: str, channel: Any) -> None:
    print(f"stdout of {rank}")
    channel.send({"event": "greeting", "rank": rank, "text": f"hello {name}"})


def fail_as_user(channel: Any) -> None:
    reporting(_raise, ModelLoadError("model.path=/x is not there"), channel=channel)


def fail_as_programmer(channel: Any) -> None:
    reporting(_raise, ZeroDivisionError("one over nothing"), channel=channel)


def _raise(error: Exception, *, channel: Any) -> None:
    raise error


def kill_itself(rank: int, channel: Any) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    channel.send({"event": "pid", "pid": os.getpid()})
    time.sleep(600)
