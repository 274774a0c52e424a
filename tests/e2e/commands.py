"""Starts the command line in real processes, and finds the ranks that it starts."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120
RANK_FILE = re.compile(r"rank(\d+)\.stderr\.log")
LAUNCHER_VARIABLES = ("NODE_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

STARTED: list[subprocess.Popen] = []
"""Commands of the current test; `end_started` ends those that a failed one has left."""


def command(model, *overrides):
    """Words after `python`."""
    return [
        "-m",
        "inferkit",
        "model=llama",
        f"model.path={model}",
        "model.dtype=float32",
        *overrides,
    ]


def environment(**variables):
    inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    return inherited | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"} | variables


def start(directory, words, *, before=(), **variables):
    """Start `python *words`; `before` are words of a program that runs it."""
    process = subprocess.Popen(
        [*before, sys.executable, *words],
        cwd=directory,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    STARTED.append(process)
    return process


def end_started():
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.wait()
        process.stdout.close()


def finish(process, deadline_s=DEADLINE_S):
    """Wait for the end; returns what it printed."""
    try:
        return process.communicate(timeout=deadline_s)[0]
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        output = process.communicate()[0]
        raise AssertionError(f"did not end within {deadline_s} s: {output}") from None


def token_ids(run_dir):
    lines = (Path(run_dir) / "generations.jsonl").read_text().splitlines()
    return [json.loads(line)["token_ids"] for line in lines]


def wait_until_decoding(process, log):
    """Wait until a rank's log tells of its second step."""
    deadline = time.monotonic() + DEADLINE_S
    while not (log.exists() and "step=1 " in log.read_text()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)


def ranks_of(process):
    """Processes of the ranks that a command has started, by rank.

    They are children of the fork server, which is a child of the command. What tells them apart
    is the file that each has open: process ids begin anew after the highest.
    """
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in children if child.ppid() != process.pid]
    return sorted(ranks, key=rank_of)


def rank_of(process):
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if found := RANK_FILE.search(os.readlink(descriptor)):
                return int(found[1])
    raise AssertionError(f"{process} has no file of a rank open")


def assert_ended(processes, timeout_s=10):
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not alive, [child.cmdline() for child in alive]
