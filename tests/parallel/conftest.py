"""Writes the equality matrix as a table, where asked:

EQUALITY_TABLE=table.md python -m pytest -m "full or not full" tests/parallel -k equals
"""

import os
from pathlib import Path
from typing import Any

from tests.parallel.splits import SPLITS

OUTCOMES: dict[tuple[str, str], str] = {}


def pytest_runtest_logreport(report: Any) -> None:
    """A cell is a test whose parameters are [<model>-<split>]."""
    parameters = report.nodeid.rpartition("[")[2].removesuffix("]")
    model, _, split = parameters.rpartition("-")
    if split in SPLITS and (report.when == "call" or report.failed):
        OUTCOMES[model, split] = "=" if report.passed else "FAILED"


def pytest_sessionfinish() -> None:
    path = os.environ.get("EQUALITY_TABLE")
    if not path or not OUTCOMES:
        return
    rows = [f"| model | {' | '.join(SPLITS)} |", "|---" * (len(SPLITS) + 1) + "|"]
    for model in sorted({model for model, _ in OUTCOMES}):
        cells = (OUTCOMES.get((model, split), "") for split in SPLITS)
        rows.append(f"| {model} | {' | '.join(cells)} |")
    Path(path).write_text("\n".join(rows) + "\n", "utf-8")
