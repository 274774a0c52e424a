import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inferkit.bench.kv_transfer import _parse, _shapes, _summary
from inferkit.kv_transfer.engines.runs import LOCAL, REMOTE, as_runs, expand_runs, first_outside

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inferkit.bench.kv_transfer", *args],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_ratios_are_taken_within_a_round():
    # The machine was half as fast in the second round: the ratios do not change.
    rounds = [
        {
            "one": {"memory_copy": 10.0 * f, "socket": 2.0 * f, "tcp": 1.5 * f},
            "latency": {"tcp": 1e-4 / f},
        }
        for f in (1.0, 0.5, 0.25)
    ]
    summary = _summary(rounds)
    row = summary["shapes"]["one"]["tcp"]
    assert row["bytes_per_s"] == 0.75
    assert row["of_memory_copy"] == row["of_memory_copy_min"] == pytest.approx(0.15)
    assert row["of_socket"] == row["of_socket_max"] == pytest.approx(0.75)
    assert summary["latency_s"] == {"tcp": 2e-4}


@pytest.mark.parametrize("num_bytes", [1 * MIB, 3 * MIB])
def test_every_shape_moves_every_byte_once(num_bytes: int):
    sizes = np.array([num_bytes])
    for name, runs in _shapes(num_bytes).items():
        rows = as_runs(runs)
        for side in (LOCAL, REMOTE):
            assert first_outside(rows[:, side], sizes) is None, name
            counts = np.zeros(num_bytes, np.uint8)
            for row in expand_runs(rows)[:, side].tolist():
                counts[row[1] : row[1] + row[2]] += 1
            assert (counts == 1).all(), name


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--engines", "tcp,pigeon"], "pigeon is no engine; allowed are shared_memory, tcp"),
        (["--rounds", "0"], "0 is out of range; allowed is >= 1"),
    ],
)
def test_a_wrong_argument_is_one_message(argv: list[str], message: str, capsys):
    with pytest.raises(SystemExit, match="2"):
        _parse(argv)
    assert message in capsys.readouterr().err


def test_the_command_measures_what_runs_here():
    result = bench("--rounds", "2", "--mib", "2", "--engines", "shared_memory,tcp,memfabric")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    # Without the package, or with it but without an Ascend driver.
    assert "memfabric" in report["not_run"] and "memfabric did not run" in result.stderr
    assert set(report["latency_s"]) == {"shared_memory", "tcp"}
    assert len(report["shapes"]) == 4
    for rows in report["shapes"].values():
        assert list(rows) == ["memory_copy", "socket", "shared_memory", "tcp"]
        for row in rows.values():
            assert row["bytes_per_s"] > 0
            assert 0 < row["of_socket_min"] <= row["of_socket"] <= row["of_socket_max"]
