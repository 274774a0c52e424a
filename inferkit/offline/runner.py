"""What the parent of an offline run does: start the ranks, show progress, tell the result.

Imports no torch until ranks start.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from inferkit.config.schema import InferenceConfig
from inferkit.offline.summary import print_summary
from inferkit.runtime.place import find_node, reserved_port
from inferkit.runtime.worker_group import run_workers

ENTRYPOINT = "inferkit.offline.worker:offline_worker"


class OfflineRunner:
    """Runs the configured prompts in fresh processes, one per rank, and leaves a run directory.

    With several nodes each runs its share of the ranks; the first tells the result.
    """

    def run(self, config: InferenceConfig, *, run_dir: Path) -> dict[str, Any]:
        """Returns the metrics of the run; nothing on a node that is not the first.

        Raises:
            ConfigError: this machine is no node of the run.
            WorkerError: a rank failed; the message is the rank's own.
        """
        node = find_node(config.parallel)
        level = logging.getLevelName(logging.getLogger().level)
        outcome: dict[str, Any] = {}
        with _display() as display, reserved_port(config.parallel.master_port) as port:

            def on_event(event: dict[str, Any]) -> None:
                if event["event"] == "result":
                    outcome.update(event)
                else:
                    display.show(event)

            places = node.places(config.parallel, master_port=port)
            run_workers(
                ENTRYPOINT,
                {place.rank: (place, config, run_dir, level) for place in places},
                log_dir=run_dir / "workers",
                on_event=on_event,
            )
        if node.node_rank:
            first = config.parallel.node_ips[0]
            print(f"node {node.node_rank} has finished; the results are on node 0 ({first})")
            return {}
        print_summary(outcome["metrics"], outcome["results"], run_dir=run_dir)
        metrics: dict[str, Any] = outcome["metrics"]
        return metrics


@contextlib.contextmanager
def _display() -> Iterator["_Display"]:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        yield _Display(progress)


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
