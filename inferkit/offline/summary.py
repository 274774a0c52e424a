"""The end of an offline run on the terminal: the figures that matter and a few generations."""

import os
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferkit.core.request import FinishReason
from inferkit.offline.prompts import Prompt
from inferkit.offline.result import GenerationResult

MAX_GENERATIONS = 4
MAX_PROMPT_LEN = 100
"""Characters; long texts lose their end here, never in generations.jsonl."""
MAX_TEXT_LEN = 300
REFUSALS = (FinishReason.PROMPT_TOO_LONG, FinishReason.REFUSED)
"""How a request ends that never ran."""


class PatientConsole(Console):
    """A reader that went away (`| head`) does not end the process: the run is complete."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_summary(
    metrics: Mapping[str, Any],
    results: Sequence[GenerationResult],
    *,
    run_dir: Path | None = None,
    console: Console | None = None,
) -> None:
    """Print the metrics of `collect_metrics`, the first generations, and where the rest is."""
    console = console or PatientConsole()
    for result in results[:MAX_GENERATIONS]:
        console.print(_generation(result))
    console.print(_metrics_table(metrics))
    refused = num_refused(metrics)
    if 0 < refused < metrics["num_requests"]:
        warning = (
            f"warning: {refused} of {metrics['num_requests']} requests were refused and generated "
            "nothing; finish_detail in generations.jsonl says why"
        )
        console.print(Text(warning, style="yellow"), soft_wrap=True)
    if run_dir is not None:
        # Wrapped at no width: a path that is cut into lines cannot be copied.
        console.print(Text(f"run directory: {run_dir}"), soft_wrap=True)


def num_refused(metrics: Mapping[str, Any]) -> int:
    """Requests that could not run with this configuration."""
    return sum(metrics["finish_reasons"].get(str(reason), 0) for reason in REFUSALS)


def _generation(result: GenerationResult) -> Text:
    """Plain text: what a model writes is never read as markup."""
    text = Text()
    text.append("prompt  ", style="bold")
    text.append(shorten(prompt_text(result.prompt), MAX_PROMPT_LEN))
    text.append("\noutput  ", style="bold green")
    text.append(shorten(result.text, MAX_TEXT_LEN) or "(empty)")
    detail = f": {result.finish_detail}" if result.finish_detail else ""
    text.append(
        f"\n        [{result.finish_reason}{detail}; {len(result.token_ids)} tokens]\n", style="dim"
    )
    return text


def _metrics_table(metrics: Mapping[str, Any]) -> Table:
    throughput = (
        f"{number(metrics['output_tokens_per_s'])} output tokens/s, "
        f"{number(metrics['total_tokens_per_s'])} in all"
    )
    wall_time = f"{number(metrics['wall_time_s'])} s"
    if metrics["load_time_s"] is not None:
        wall_time += f" after {number(metrics['load_time_s'])} s to load"
    reasons = ", ".join(f"{num} {reason}" for reason, num in metrics["finish_reasons"].items())
    num_prompt, num_output = metrics["num_prompt_tokens"], metrics["num_output_tokens"]
    used, total = metrics["kv_blocks_used_max"], metrics["kv_blocks_total"]
    rows = {
        "requests": f"{metrics['num_requests']} ({reasons})",
        "tokens": f"{num_prompt} prompt, {num_output} output",
        "throughput": throughput,
        "time to first token": milliseconds(metrics["ttft_s"]),
        "time per output token": milliseconds(metrics["tpot_s"]),
        **{
            f"{kind} step": milliseconds(step["step_time_s"])
            for kind, step in metrics["steps"].items()
            if step["step_time_s"]["num"]
        },
        "KV blocks": f"{used} of {total} at most" if total is not None else "-",
        "peak memory": f"{metrics['peak_memory_bytes'] / 2**30:.2f} GiB",
        "wall time": wall_time,
    }
    if metrics["num_truncated_prompts"]:
        rows["truncated prompts"] = f"{metrics['num_truncated_prompts']} (data.input_truncated_len)"
    if metrics["num_preemptions"]:
        rows["preemptions"] = str(metrics["num_preemptions"])
    if metrics["num_cached_prompt_tokens"]:
        rows["prefix cache"] = f"{metrics['num_cached_prompt_tokens']} prompt tokens"
    if metrics.get("expert_load") and metrics["expert_load"]["imbalance"] is not None:
        imbalance = number(metrics["expert_load"]["imbalance"])
        rows["expert load"] = f"at most {imbalance} times the mean of its layer"
    table = Table(title="offline run", title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def prompt_text(prompt: Prompt) -> str:
    """A prompt in one line: the last message of a chat, the first ids of a list."""
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[-1], dict):
        return str(prompt[-1].get("content", ""))
    return f"{len(prompt)} token ids"


def shorten(text: str, max_len: int) -> str:
    """At most `max_len` characters on one line, without characters that control a terminal."""
    line = "".join(c for c in " ".join(text.split()) if unicodedata.category(c) != "Cc")
    return line if len(line) <= max_len else line[: max_len - 3] + "..."


def milliseconds(figures: Mapping[str, Any]) -> str:
    """`statistics` of times in seconds, as one line."""
    if not figures["num"]:
        return "-"
    p50, p90, p99 = (number(figures[name] * 1e3) for name in ("p50", "p90", "p99"))
    return f"{number(figures['mean'] * 1e3)} ms mean; p50 {p50}, p90 {p90}, p99 {p99}"


def number(value: float | None) -> str:
    """Three significant digits, and no fewer than the integer part has."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
