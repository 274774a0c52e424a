"""Whether two runs have generated the same tokens, request by request."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferkit.core.errors import ConfigError

OUTPUT_FILES = ("generations.jsonl", "requests.jsonl")
"""Of an offline run, and of a load on a service: one object per line, with `request_id` and
`token_ids`."""
MAX_REQUESTS_SHOWN = 5

Tokens = Mapping[int, list[int]]
"""Request id -> its output tokens."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How the outputs of two runs compare."""

    num_requests: int
    """Of the recorded run."""
    differences: tuple[str, ...]
    """A line for each request whose tokens differ, or that only one run has."""

    @property
    def is_same(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self.is_same:
            return f"same tokens: {self.num_requests} of {self.num_requests} requests"
        rest = len(self.differences) - MAX_REQUESTS_SHOWN
        lines = [f"  {line}" for line in self.differences[:MAX_REQUESTS_SHOWN]]
        lines += [f"  and {rest} more"] if rest > 0 else []
        count = f"{len(self.differences)} of {self.num_requests} requests"
        return "\n".join([f"other tokens: {count}", *lines])


def read_tokens(run_dir: Path) -> Tokens | None:
    """Output tokens of a run; None where it has left none.

    Raises:
        ConfigError: its file cannot be read.
    """
    for path in (run_dir / name for name in OUTPUT_FILES):
        if path.is_file():
            return dict(_token_ids(path, line) for line in _lines(path))
    return None


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _token_ids(path: Path, line: str) -> tuple[int, list[int]]:
    try:
        record: dict[str, Any] = json.loads(line)
        return int(record["request_id"]), list(record["token_ids"])
    except (ValueError, TypeError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{path} has a line without request_id and token_ids ({problem})"
        ) from None


def compare_tokens(recorded: Tokens, replayed: Tokens, *, is_whole: bool = True) -> Agreement:
    """Requests are matched by their ids, which count the prompts.

    Args:
        is_whole: the recorded run came to its end; else only what it had finished is compared.
    """
    differences = []
    for request_id in sorted({*recorded, *replayed} if is_whole else recorded):
        old, new = recorded.get(request_id), replayed.get(request_id)
        if old != new:
            differences.append(f"request {request_id}: {_difference(old, new)}")
    return Agreement(num_requests=len(recorded), differences=tuple(differences))


def _difference(old: list[int] | None, new: list[int] | None) -> str:
    if old is None:
        return "is not in the recorded run"
    if new is None:
        return "is missing"
    for position, (left, right) in enumerate(zip(old, new, strict=False)):
        if left != right:
            return f"token {position} is {right}, was {left}"
    return f"{len(new)} tokens, were {len(old)}; all that both have are equal"
