"""Which steps end up in which trace."""

import json
from pathlib import Path

import pytest
import torch

from inferkit.engine.profiler import NullProfiler, Profiler

CPU = [torch.profiler.ProfilerActivity.CPU]


def run(profiler: Profiler | NullProfiler, steps: str) -> None:
    """One step per letter: p = prefill, d = decode. Step i multiplies i times."""
    for i, kind in enumerate(steps, start=1):
        with profiler.step(kind == "p"):
            for _ in range(i):
                torch.ones(4, 4).matmul(torch.ones(4, 4))


def events(path: Path, name: str) -> int:
    return sum(e.get("name") == name for e in json.loads(path.read_text())["traceEvents"])


def test_first_prefill_and_decode_steps_four_to_six_are_traced(tmp_path: Path) -> None:
    profiler = Profiler(output_dir=tmp_path, activities=CPU, rank=2)
    run(profiler, "pp" + "d" * 8)
    profiler.close()
    prefill, decode = tmp_path / "prefill" / "rank2.json", tmp_path / "decode" / "rank2.json"
    assert events(prefill, "prefill step") == 1
    assert events(prefill, "aten::matmul") == 1
    assert events(decode, "decode step") == 3
    assert events(decode, "aten::matmul") == 6 + 7 + 8


def test_a_prefill_between_traced_decodes_keeps_its_name(tmp_path: Path) -> None:
    profiler = Profiler(output_dir=tmp_path, activities=CPU)
    run(profiler, "pdddd" + "p" + "dd")
    profiler.close()
    assert events(tmp_path / "decode" / "rank0.json", "decode step") == 3
    assert events(tmp_path / "decode" / "rank0.json", "prefill step") == 1


def test_close_writes_the_trace_of_a_run_that_ended_early(tmp_path: Path) -> None:
    profiler = Profiler(output_dir=tmp_path, activities=CPU)
    run(profiler, "pdddd")
    assert not (tmp_path / "decode").exists()
    profiler.close()
    profiler.close()
    assert events(tmp_path / "decode" / "rank0.json", "decode step") == 1


def test_close_after_a_step_that_failed(tmp_path: Path) -> None:
    profiler = Profiler(output_dir=tmp_path, activities=CPU)
    with pytest.raises(RuntimeError, match="device lost"), profiler.step(True):
        raise RuntimeError("device lost")
    profiler.close()
    assert events(tmp_path / "prefill" / "rank0.json", "prefill step") == 1


def test_null_profiler_does_nothing(tmp_path: Path) -> None:
    profiler = NullProfiler()
    run(profiler, "pdddddd")
    profiler.close()
    assert list(tmp_path.iterdir()) == []
