"""The program that launchers leave their roles to."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
KEEP = [sys.executable, "-m", "inferkit.online.cluster.keep"]
SERVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
print("inferkit: ready at http://127.0.0.1:1", flush=True)
time.sleep(600)
"""
LIMIT_S = 60


def start(*words, directory):
    return subprocess.Popen(
        [*KEEP, *words],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_roles_are_kept_until_a_signal(tmp_path):
    serves = [sys.executable, "-c", SERVES]
    with start("logs", "router", *serves, "++", "decode", *serves, directory=tmp_path) as keep:
        assert keep.stdout is not None
        shown = [keep.stdout.readline() for _ in range(3)]
        keep.send_signal(signal.SIGTERM)
        shown += keep.stdout.readlines()
        assert keep.wait(LIMIT_S) == 0
    assert shown[0] == "inferkit: router, decode; logs in logs\n"
    assert sorted(shown[1:3]) == [
        f"[{name}] ready at http://127.0.0.1:1\n" for name in ("decode", "router")
    ]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "decode.log",
        "router.log",
    ]


def test_a_role_that_is_refused_ends_all(tmp_path):
    words = [sys.executable, "-c", "print('inferkit: 1 fault'); raise SystemExit(2)"]
    begin_s = time.monotonic()
    result = subprocess.run(
        [*KEEP, "logs", "prefill", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 1
    assert "inferkit: prefill cannot start (exit code 2" in result.stderr
    assert "1 fault" in result.stderr.splitlines()[-1]
    assert time.monotonic() - begin_s < LIMIT_S


def test_a_dry_run_shows_the_commands(tmp_path):
    words = ["--dry-run", "logs", "a", "one", "two words", "++", "b", "three"]
    result = subprocess.run(
        [*KEEP, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0
    assert result.stdout == "a: one 'two words'\nb: three\n"


def test_commands_must_be_named(tmp_path):
    with start("logs", "router", directory=tmp_path) as keep:
        output, _ = keep.communicate(timeout=LIMIT_S)
    assert keep.returncode == 2
    assert output.startswith("keep: LOG_DIR NAME PROGRAM")
