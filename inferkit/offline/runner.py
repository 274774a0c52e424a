"""What the parent of an offline run does: start the worker, show progress, tell the result.

Imports no torch until workers start.
"""

import logging
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from inferkit.config.schema import InferenceConfig
from inferkit.offline.summary import print_summary
from inferkit.runtime.worker_group import run_workers


class OfflineRunner:
    """Runs the configured prompts in a fresh worker process and leaves a run directory."""

    def run(self, config: InferenceConfig, *, run_dir: Path) -> dict[str, Any]:
        """Returns the metrics of the run.

        Raises:
            WorkerError: the worker failed; its message is the worker's own.
        """
        from inferkit.offline.worker import offline_worker  # heavy: brings torch

        outcome: dict[str, Any] = {}
        console = Console(stderr=True)
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=console,
        ) as progress:
            display = _Display(progress)

            def on_event(event: dict[str, Any]) -> None:
                if event["event"] == "result":
                    outcome.update(event)
                else:
                    display.show(event)

            level = logging.getLevelName(logging.getLogger().level)
            run_workers(
                offline_worker,
                [(0, config, run_dir, level)],
                log_dir=run_dir / "workers",
                on_event=on_event,
            )
        print_summary(outcome["metrics"], outcome["results"], run_dir=run_dir)
        metrics: dict[str, Any] = outcome["metrics"]
        return metrics


class _Display:
    """One progress bar at a time: loading, then generating."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("starting", total=None, status="")

    def show(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "stage":
            self.progress.update(self.task, description=event["text"], status="")
            if "num_prompts" in event:
                self.progress.reset(self.task, total=event["num_prompts"])
        elif kind == "load":
            self.progress.update(self.task, completed=event["done"], total=event["total"])
        elif kind == "step":
            record = event["record"]
            self.progress.update(
                self.task,
                completed=event["num_finished"],
                status=f"step {record.step} {record.kind}: {record.num_requests} requests, "
                f"{record.num_tokens} tokens, kv {record.kv_used}/{record.kv_total}, "
                f"waiting {record.num_waiting}, {record.step_time_s * 1e3:.0f} ms",
            )
