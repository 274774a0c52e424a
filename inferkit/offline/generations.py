"""The file generations.jsonl: in the order of the prompts at the end of a run, and what of it there
is of a run that did not come to its end.

While a run lasts, the leader of every DP rank writes each result into a part of its own as soon as
it is there, so that nothing is lost with a process that is killed. Torch-free.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inferkit.config.provenance import write_text
from inferkit.offline.result import GenerationResult, OnResult

GENERATIONS_FILE = "generations.jsonl"
PARTS = "generations.rank*.jsonl"


def part_path(run_dir: Path, rank: int) -> Path:
    """Where a rank keeps what is finished until the run is."""
    return run_dir / PARTS.replace("*", str(rank))


@contextlib.contextmanager
def open_part(path: Path) -> Iterator[OnResult]:
    """Yields a function that adds a result to a new part; it is on its way to disk on return."""
    with path.open("w", encoding="utf-8") as file:

        def add(result: GenerationResult) -> None:
            file.write(result.to_json() + "\n")
            file.flush()

        yield add


def write_generations(run_dir: Path, results: Sequence[GenerationResult]) -> None:
    """Write the results of a run that is complete."""
    write_text(run_dir / GENERATIONS_FILE, "".join(result.to_json() + "\n" for result in results))


def remove_generations(run_dir: Path) -> None:
    """Remove what an earlier run has left in this folder, before any rank starts."""
    for path in [run_dir / GENERATIONS_FILE, *run_dir.glob(PARTS)]:
        path.unlink(missing_ok=True)


def keep_finished(run_dir: Path) -> int | None:
    """Put the parts together once all ranks have ended; returns the number of generations.

    They keep the order of the prompts. None = there is no part, or the run's file is complete.
    """
    parts = sorted(run_dir.glob(PARTS))
    if not parts:
        return None
    is_complete = (run_dir / GENERATIONS_FILE).exists()
    lines = [line for part in parts for line in _whole_lines(part)]
    lines.sort(key=lambda line: int(line["request_id"]))
    if not is_complete:
        texts = (json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_text(run_dir / GENERATIONS_FILE, "".join(texts))
    for part in parts:
        part.unlink()
    return None if is_complete else len(lines)


def _whole_lines(part: Path) -> list[dict[str, Any]]:
    """A rank that was killed while it wrote has left a line without an end."""
    lines = part.read_text("utf-8", errors="replace").split("\n")[:-1]
    return [json.loads(line) for line in lines]
