"""Folders of sweeps as `inferkit -m` leaves them, without running one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

COMMON = ("model=llama", "platform=cpu")


def statistics(value: float) -> dict[str, float | int]:
    return {"num": 8, "mean": value, "p50": value, "p90": value * 1.5, "p99": value * 2}


def metrics(*, tokens_per_s: float, ttft_s: float, tpot_s: float, **more: Any) -> dict[str, Any]:
    """The part of metrics.json that a summary looks at."""
    return {
        "num_requests": 8,
        "wall_time_s": 4.0,
        "output_tokens_per_s": tokens_per_s,
        "ttft_s": statistics(ttft_s),
        "tpot_s": statistics(tpot_s),
        "expert_load": {"imbalance": 1.5, "layers": {"0": {"imbalance": 1.5, "counts": [1, 2]}}},
        **more,
    }


def write_cell(
    sweep_dir: Path,
    number: int,
    overrides: Sequence[str],
    *,
    status: str = "ok",
    error: str | None = None,
    values: Mapping[str, Any] | None = None,
    world_size: int = 1,
    sweep: Mapping[str, Any] | None = None,
    requests: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """One cell's folder; `values` are its metrics."""
    run_dir = sweep_dir / str(number)
    run_dir.mkdir(parents=True)
    result = {
        "number": number,
        "overrides": [*COMMON, *overrides],
        "status": status,
        "seconds": 1.5 + number,
        "error": error,
        "traceback": None,
        "metrics": dict(values or {}),
    }
    config = {"parallel": {"world_size": world_size}, "sweep": dict(sweep or {})}
    (run_dir / "result.json").write_text(json.dumps(result), "utf-8")
    (run_dir / "config.resolved.yaml").write_text(yaml.safe_dump(config), "utf-8")
    if values:
        (run_dir / "metrics.json").write_text(json.dumps(dict(values)), "utf-8")
    if requests:
        text = "".join(json.dumps(dict(request)) + "\n" for request in requests)
        (run_dir / "generations.jsonl").write_text(text, "utf-8")
    return run_dir


def write_grid(sweep_dir: Path, **options: Any) -> None:
    """Batch 1, 8, 64 x tp1, tp2; #4 (batch 64, tp1) has failed."""
    number = 0
    for batch in (1, 8, 64):
        for size in (1, 2):
            overrides = (f"scheduler.batch_size={batch}", f"parallel=tp{size}")
            values = metrics(
                tokens_per_s=100.0 * batch**0.7 * size**0.5,
                ttft_s=0.4 / size / batch**0.5,
                tpot_s=0.01 * batch**0.3 / size**0.5,
            )
            if number == 4:
                error = "rank 0 was killed by SIGKILL"
                write_cell(sweep_dir, number, overrides, status="failed", error=error, **options)
            else:
                write_cell(sweep_dir, number, overrides, values=values, world_size=size, **options)
            number += 1
