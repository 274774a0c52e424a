"""The end of a load on the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from inferkit.bench.load.client import Outcome
from inferkit.offline.summary import PatientConsole, milliseconds, number

BUSY_CLIENT = 0.7
"""Share of one core above which this client itself delays what it measures."""
SLOW_CLIENT_S = 0.05
"""Requests that are sent so late on the whole are no longer the load that was asked for."""


def print_load_summary(
    metrics: Mapping[str, Any], outcomes: Sequence[Outcome], *, load: str, run_dir: Path
) -> None:
    """Print the metrics of `collect_load_metrics`, and where the rest is.

    Args:
        load: what was asked for, in words.
    """
    console = PatientConsole()
    console.print(load_table(metrics, load))
    for text in warnings(metrics, outcomes):
        console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)
    # Wrapped at no width: a path that is cut into lines cannot be copied.
    console.print(Text(f"run directory: {run_dir}"), soft_wrap=True)


def load_table(metrics: Mapping[str, Any], load: str) -> Table:
    num_prompt, num_output = metrics["num_prompt_tokens"], metrics["num_output_tokens"]
    reasons = ", ".join(f"{num} {reason}" for reason, num in metrics["finish_reasons"].items())
    per_device = (metrics["output_tokens_per_s"] or 0.0) / metrics["num_devices"]
    rows = {
        "load": load,
        "requests": f"{metrics['num_requests']} ({reasons}), {number(metrics['request_per_s'])}/s",
        "tokens": f"{num_prompt} prompt, {num_output} output",
        "throughput": f"{number(metrics['output_tokens_per_s'])} output tokens/s, "
        f"{number(metrics['total_tokens_per_s'])} in all",
        "per rank": f"{number(per_device)} output tokens/s on {metrics['num_devices']}",
        "time to first token": milliseconds(metrics["ttft_s"]),
        "time per output token": milliseconds(metrics["tpot_s"]),
        "whole answer": milliseconds(metrics["e2e_s"]),
        "wall time": f"{number(metrics['wall_time_s'])} s after "
        f"{number(metrics['load_time_s'])} s to start the service",
    }
    table = Table(title="load on a service", title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def warnings(metrics: Mapping[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    """What a reader of the figures must know."""
    found = []
    if metrics["num_failed"]:
        first = next(outcome for outcome in outcomes if not outcome.is_ok)
        found.append(
            f"{metrics['num_failed']} of {metrics['num_requests']} requests failed; the first: "
            f"{first.error} (all are in requests.jsonl)"
        )
    late_s = metrics["send_delay_s"]["p50"]
    if late_s is not None and late_s > SLOW_CLIENT_S:
        found.append(
            f"half of the requests were sent {number(late_s * 1e3)} ms late or more: this machine "
            "is too slow for the load and the service together"
        )
    share = metrics["client_cpu_share"]
    if share is not None and share > BUSY_CLIENT:
        found.append(
            f"this client was busy for {100 * share:.0f} % of the time, so a part of what it "
            "measured is its own: the service may be faster"
        )
    return found
