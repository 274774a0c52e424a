"""A runner that costs nothing and behaves as it is told, in a package of a user's own."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0

# Cells of the numbers that it is given fail until the folder holds a file `cured`.
SOURCE = """
import json
import os
import signal
import time
from pathlib import Path

from inferkit.core.errors import WorkerError


class Runner:
    def __init__(self, *, number=0, raises=-1, dies=-1, hangs=-1):
        self.number, self.raises, self.dies, self.hangs = number, raises, dies, hangs

    def run(self, config, *, run_dir):
        with open("ran.txt", "a") as log:
            log.write(f"{self.number}\\n")
        if not Path("cured").exists():
            if self.number == self.raises:
                raise WorkerError("out of luck")
            if self.number == self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.number == self.hangs:
                time.sleep(10_000)
        metrics = {"output_tokens_per_s": 100.0 + self.number}
        metrics |= {name: {"p50": 0.01 * (1 + self.number)} for name in ("ttft_s", "tpot_s")}
        (run_dir / "metrics.json").write_text(json.dumps(metrics))
        return metrics
"""
OWN = ("runner._target_=moody_package.parts.Runner", "allowed_targets=[moody_package]")


def write_package(folder: Path) -> None:
    package = folder / "moody_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(textwrap.dedent(SOURCE))


def numbers(values: str, **moods: int) -> list[str]:
    """The axis `number`, and which of its values behave how."""
    params = "".join(f",{mood}:{number}" for mood, number in moods.items())
    given = [f"+runner.params={{number:0{params}}}"] if params else ["+runner.params={number:0}"]
    return [*OWN, *given, f"runner.params.number={values}"]


def start(*words: str, cwd: Path, **streams: Any) -> subprocess.Popen[str]:
    """The program, in a process group of its own as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "inferkit", *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def finished(*words: str, cwd: Path, limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    running = start(*words, cwd=cwd)
    out, err = running.communicate(timeout=limit_s)
    return running.returncode, out, err


def results(sweep_dir: Path) -> dict[int, dict[str, Any]]:
    """Number -> result.json, of cells that lie at their numbers."""
    found = (path for path in sweep_dir.iterdir() if path.name.isdecimal())
    read = {int(path.name): path / "result.json" for path in found}
    return {number: json.loads(path.read_text()) for number, path in sorted(read.items())}


def ran(folder: Path) -> list[int]:
    """Numbers whose runs have begun, in order."""
    path = folder / "ran.txt"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def wait_until(holds: Any, what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def pids_of(sweep_dir: Path) -> list[int]:
    """Processes whose command names a folder of the sweep."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"hydra.run.dir='{sweep_dir}" in words:
            found.append(int(path.parent.name))
    return found
