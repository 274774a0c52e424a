"""What a report shows of single requests: texts of a run, times of a load."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from inferkit.inspect.report.figures import time_text
from inferkit.inspect.report.page import Field, Generation, LongText, Table, TableRow, Title
from inferkit.sweep.table import number_text

GENERATIONS_FILE, REQUESTS_FILE = "generations.jsonl", "requests.jsonl"
MAX_GENERATIONS = 100
MAX_REQUESTS = 2000
FOLDED_LEN = 600
"""Characters above which a text is folded."""
START_LEN = 160
MAX_TEXT_LEN = 20_000


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a .jsonl file; a line that was cut off by the end of a run is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def read_generations(run_dir: Path) -> tuple[list[Generation], int]:
    """The first ones, and how many there are beside them."""
    lines = _lines(run_dir / GENERATIONS_FILE)
    shown = [_generation(line) for line in islice(lines, MAX_GENERATIONS)]
    return shown, sum(1 for _ in lines)


def _generation(line: Mapping[str, Any]) -> Generation:
    facts = [str(line.get("finish_reason") or "unfinished")]
    if line.get("finish_detail"):
        facts.append(str(line["finish_detail"]))
    facts.append(f"{len(line.get('prompt_token_ids') or ())} prompt tokens")
    facts.append(f"{len(line.get('token_ids') or ())} tokens")
    for name, text in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E")):
        if line.get(name) is not None:
            facts.append(f"{text} {time_text(line[name])}")
    return Generation(
        request_id=int(line.get("request_id") or 0),
        facts=tuple(facts),
        prompt=long_text(_prompt(line.get("prompt"))),
        output=long_text(str(line.get("text") or "")),
    )


def _prompt(prompt: Any) -> str:
    """A text, the messages of a chat, or how many ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
        return "\n".join(f"{one.get('role', '')}: {_content(one)}" for one in prompt)
    if isinstance(prompt, list):
        return f"{len(prompt)} token ids"
    return str(prompt or "")


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def long_text(text: str) -> LongText:
    """Folded where it is long; of a very long one the end is only in its file."""
    if len(text) > MAX_TEXT_LEN:
        text = f"{text[:MAX_TEXT_LEN]}\n... {len(text) - MAX_TEXT_LEN:,} more characters"
    start = f"{' '.join(text[:START_LEN].split())} ... " if len(text) > FOLDED_LEN else ""
    return LongText(whole=text, start=start)


def requests_table(run_dir: Path) -> Table | None:
    """Of a load, which has times but no texts; None where there was none."""
    lines = _lines(run_dir / REQUESTS_FILE)
    shown = sorted(islice(lines, MAX_REQUESTS), key=lambda line: int(line["request_id"]))
    if not shown:
        return None
    more = sum(1 for _ in lines)
    columns = {"TTFT, ms": "ttft_s", "TPOT, ms": "tpot_s", "E2E, ms": "e2e_s"}
    titles = ["request", "prompt tokens", "tokens", "ended by", *columns]
    rows = [_request(line, columns.values()) for line in shown]
    return Table(
        titles=tuple(Title(text=text, is_number=text != "ended by") for text in titles),
        rows=tuple(rows),
        text=f"{more:,} more are in {REQUESTS_FILE}." if more else "",
    )


def _request(line: Mapping[str, Any], times: Iterable[str]) -> TableRow:
    counts = (line["request_id"], line.get("num_prompt_tokens"), len(line.get("token_ids") or ()))
    error = line.get("error")
    reason = str(line.get("finish_reason") or "") + (f": {error}" if error else "")
    fields: Sequence[Field] = [
        *(_count(count) for count in counts),
        Field(text=reason, value=reason),
        *(_time(line.get(name)) for name in times),
    ]
    return TableRow(cells=tuple(fields), kind="bad" if error else "")


def _count(count: int | None) -> Field:
    text = "" if count is None else str(count)
    return Field(text=text, value=text, is_number=True)


def _time(seconds: float | None) -> Field:
    if seconds is None:
        return Field(text="", is_number=True)
    return Field(text=number_text(seconds * 1e3), value=repr(seconds), is_number=True)
