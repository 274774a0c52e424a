"""Folders that reports are made of: a run, and a sweep with a cell that failed."""

import base64
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from inferkit.config.check import Checker
from inferkit.config.origins import find_origins
from inferkit.config.provenance import write_run
from inferkit.config.recorded import write_origins
from inferkit.config.space import ConfigSpace
from tests.sweep.sweeps import metrics

EVIL = '<script>document.title = "broken in"</script><img src=x onerror="alert(1)">'
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg"
    "=="
)
"""A picture."""
SPACE = ConfigSpace()


def write_reported_run(
    folder: Path, words: Sequence[str] = ("parallel=tp2", "scheduler.max_new_tokens=4")
) -> Path:
    """The configuration of `words`, and two generations of which the first is up to no good."""
    config = Checker(SPACE, is_run=False).check_overrides(words).config
    assert config is not None
    choices = {"parallel": "tp2", "model": "smollm2_135m"}
    write_run(folder, config, command=f"inferkit {' '.join(words)}", overrides=words, **choices)
    write_origins(folder, config, find_origins(SPACE, list(words)))
    values = metrics(tokens_per_s=123.4, ttft_s=0.2, tpot_s=0.01)
    result = {"number": 0, "overrides": list(words), "status": "ok", "seconds": 3.25}
    result |= {"error": None, "traceback": None, "metrics": values}
    (folder / "result.json").write_text(json.dumps(result), "utf-8")
    (folder / "metrics.json").write_text(json.dumps(values), "utf-8")
    generations = [
        {"request_id": 0, "prompt": [{"role": "user", "content": EVIL}], "text": f"ok {EVIL}"},
        {"request_id": 1, "prompt": "word " * 400, "text": "", "finish_reason": "length"},
    ]
    shared = {"token_ids": [1, 2], "prompt_token_ids": [3], "ttft_s": 0.2, "tpot_s": None}
    lines = (json.dumps(shared | generation) + "\n" for generation in generations)
    (folder / "generations.jsonl").write_text("".join(lines), "utf-8")
    (folder / "steps.png").write_bytes(PIXEL)
    return folder


def write_reported_sweep(folder: Path) -> Path:
    """Cells of batch 1, 2, 4; the last was killed."""
    cells = []
    template = write_reported_run(folder / "0", ["scheduler.batch_size=1"])
    for number, batch in enumerate((1, 2, 4)):
        run_dir, words = folder / str(number), [f"scheduler.batch_size={batch}"]
        if number:
            shutil.copytree(template, run_dir)
        ended = {"number": number, "overrides": words, "seconds": 9.0 - number, "metrics": {}}
        if number < 2:
            values = metrics(tokens_per_s=90.0 + 20 * number, ttft_s=0.2, tpot_s=0.01)
            result = ended | {"status": "ok", "error": None, "traceback": None}
            (run_dir / "metrics.json").write_text(json.dumps(values), "utf-8")
        else:
            failure = {"error": f"rank 0 {EVIL}", "traceback": "Traceback of the cell"}
            result = ended | {"status": "failed"} | failure
            (run_dir / "metrics.json").unlink()
        (run_dir / "result.json").write_text(json.dumps(result), "utf-8")
        cells.append({"number": number, "folder": str(number), "overrides": words})
    record = {
        "command": "inferkit -m scheduler.batch_size=1,2,4",
        "sweep": {"objective": None, "slo": {"ttft_s": None}},
        "cells": cells,
        "started_at": "2026-01-31T12:00:00+0000",
        "ended_at": None,
    }
    (folder / "sweep.json").write_text(json.dumps(record), "utf-8")
    return folder
