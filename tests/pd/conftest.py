"""Writes what the cells of the matrix came to, where asked:

PD_TABLE=table.md python -m pytest -m "full or not full" tests/pd/test_equality.py
"""

import os
from pathlib import Path
from typing import Any

from tests.pd.cells import CELLS_BY_NAME, Cell

OUTCOMES: dict[str, str] = {}
COLUMNS = ("model", "prefill", "decode", "topology", "block_size", "chunks", "engine")


def pytest_runtest_logreport(report: Any) -> None:
    """A cell is a test whose parameter is its name."""
    name = report.nodeid.rpartition("[")[2].removesuffix("]")
    if name in CELLS_BY_NAME and (report.when == "call" or report.failed):
        OUTCOMES[name] = "=" if report.passed else "FAILED"


def pytest_sessionfinish() -> None:
    path = os.environ.get("PD_TABLE")
    if not path or not OUTCOMES:
        return
    header = ("tokens", *COLUMNS, "further")
    rows = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    rows += [_row(CELLS_BY_NAME[name], outcome) for name, outcome in sorted(OUTCOMES.items())]
    Path(path).write_text("\n".join(rows) + "\n", "utf-8")


def _row(cell: Cell, outcome: str) -> str:
    values = [str(getattr(cell, column)) for column in COLUMNS]
    further = [name for name in ("digest", "retracts") if getattr(cell, name)]
    return f"| {' | '.join([outcome, *values, ', '.join(further)])} |"
