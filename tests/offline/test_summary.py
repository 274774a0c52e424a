"""What the terminal shows at the end of a run."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from inferkit.offline.metrics import collect_metrics
from inferkit.offline.result import GenerationResult
from inferkit.offline.summary import print_summary, prompt_text, shorten
from tests.offline.finished_requests import make_record, make_request


def printed(results: list[GenerationResult], width: int = 80, **kwargs: Any) -> str:
    records = [make_record(0, "prefill", 1.0), make_record(1, "decode", 7.0)]
    metrics = collect_metrics(records, [make_request()], peak_memory_bytes=2**30, **kwargs)
    console = Console(file=io.StringIO(), width=width)
    run_dir = Path("outputs/2026-01-01/12-00-00-1") / ("long" * 20)
    print_summary(metrics, results, run_dir=run_dir, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def make_result(prompt: Any, text: str) -> GenerationResult:
    return GenerationResult.from_request(make_request(), prompt, text)


def test_figures_and_generations_are_shown() -> None:
    output = printed([make_result("Why?", "Because.")], load_time_s=2.0)
    for expected in (
        "Why?",
        "Because.",
        "[length; 3 tokens]",
        "1 (1 length)",
        "4 prompt, 3 output",
        "2000 ms mean",
        "prefill step",
        "1.00 GiB",
        "8 s after 2 s to load",
        "2 of 8 at most",
        "long" * 20,
    ):
        assert expected in output
    assert "mixed step" not in output
    assert "preemptions" not in output


def test_only_the_first_generations_are_shown_shortened() -> None:
    output = printed([make_result(f"prompt {i}", "word " * 500) for i in range(9)])
    assert "prompt 3" in output
    assert "prompt 4" not in output
    assert output.count("...") == 4
    assert "to load" not in output


def test_generated_text_is_neither_markup_nor_terminal_control() -> None:
    output = printed([make_result("[red]a[/red]", "[bold]x[/nothing] \x1b[31mred\x07")])
    assert "[red]a[/red]" in output
    assert "[bold]x[/nothing] [31mred" in output
    assert "\x1b" not in output


def test_prompt_text_shows_the_last_message() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert prompt_text(messages) == "u"
    assert prompt_text([1, 2, 3]) == "3 token ids"


def test_shorten() -> None:
    assert shorten("a\n\n b", 10) == "a b"
    assert shorten("abcdefghij", 8) == "abcde..."
