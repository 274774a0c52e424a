"""What the parent of an offline run does: start the ranks, show progress, tell the result.

Imports no torch until ranks start.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.text import Text

from inferkit.config.schema import InferenceConfig
from inferkit.core.errors import RequestError
from inferkit.core.place import RankPlace
from inferkit.offline.generations import keep_finished, remove_generations
from inferkit.offline.summary import PatientConsole, num_refused, print_summary
from inferkit.runtime.launched import ending_with_launcher
from inferkit.runtime.live_progress import LiveProgress, live_progress
from inferkit.runtime.place import find_node
from inferkit.runtime.rank_errors import PEER_GRACE_S, PeerLostError, error_event, worker_error
from inferkit.runtime.worker_group import let_threads_sleep, run_workers

logger = logging.getLogger(__name__)

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
            RequestError: no request could run.
        """
        node = find_node(config.parallel)
        level = logging.getLevelName(logging.getLogger().level)
        inbox = _Inbox()
        with (
            _kept_generations(run_dir),
            live_progress() as inbox.progress,
            node.reserved_port(config.parallel) as port,
        ):
            places = node.places(config.parallel, master_port=port)
            run_workers(
                ENTRYPOINT,
                {place.rank: (place, config, run_dir, level) for place in places},
                log_dir=run_dir / "workers",
                on_event=inbox.send,
            )
        if node.node_rank:
            first = config.parallel.node_ips[0]
            text = f"node {node.node_rank} has finished; the results are on node 0 ({first})"
            PatientConsole().print(Text(text), soft_wrap=True)
            return {}
        return inbox.tell(run_dir)

    def run_rank(
        self, config: InferenceConfig, *, place: RankPlace, run_dir: Path
    ) -> dict[str, Any]:
        """Be one rank of a run whose ranks something else has started; arguments as for `run`.

        Returns the metrics on rank 0, nothing on the others.

        Raises:
            WorkerError: this rank failed.
            RequestError: on rank 0, no request could run.
        """
        let_threads_sleep()
        from inferkit.offline.worker import run_offline  # heavy: brings torch

        inbox = _Inbox()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(ending_with_launcher(place))
                if place.rank == 0:
                    inbox.progress = stack.enter_context(live_progress())
                run_offline(config, run_dir, place=place, channel=inbox)
        except PeerLostError:
            raise
        except Exception as error:
            logger.error("this rank failed", exc_info=error)
            event = error_event(error)
            if event["is_peer_loss"]:
                time.sleep(PEER_GRACE_S)
            is_alone = place.world_size == 1
            raise worker_error(place.rank, event, is_alone=is_alone, log_dir=run_dir) from error
        return {} if place.rank else inbox.tell(run_dir)


@contextlib.contextmanager
def _kept_generations(run_dir: Path) -> Iterator[None]:
    """Keep and tell what was finished where a run does not come to its end."""
    remove_generations(run_dir)
    try:
        yield
    except BaseException:
        num_kept = keep_finished(run_dir)
        if num_kept is not None:
            text = f"generations that were finished are kept: {num_kept}, in {run_dir}"
            PatientConsole(stderr=True).print(Text(text), soft_wrap=True)
        raise


class _Inbox:
    """Takes what a rank reports: shows its progress, keeps its result."""

    def __init__(self) -> None:
        self.outcome: dict[str, Any] = {}
        self.progress: LiveProgress | None = None

    def tell(self, run_dir: Path) -> dict[str, Any]:
        """Print the summary; returns the metrics.

        Raises:
            RequestError: no request could run.
        """
        metrics: dict[str, Any] = self.outcome["metrics"]
        results = self.outcome["results"]
        print_summary(metrics, results, run_dir=run_dir)
        if num_refused(metrics) == metrics["num_requests"]:
            raise RequestError(
                f"nothing was generated, for all requests ({metrics['num_requests']}) were "
                f"refused; the first: {results[0].finish_detail}"
            )
        return metrics

    def send(self, event: dict[str, Any]) -> None:
        if event["event"] == "result":
            self.outcome.update(event)
        elif self.progress is not None:
            _show(event, self.progress)


def _show(event: dict[str, Any], progress: LiveProgress) -> None:
    """Loading, then generating."""
    kind = event["event"]
    if kind == "stage":
        progress.begin(event["text"], total=event.get("num_prompts"))
    elif kind == "load":
        progress.update(event["done"], total=event["total"])
    elif kind == "step":
        record = event["record"]
        progress.update(
            event["num_finished"],
            status=f"step {record.step} {record.kind}: {record.num_requests} requests, "
            f"{record.num_tokens} tokens, kv {record.kv_used}/{record.kv_total}, "
            f"waiting {record.num_waiting}, {record.step_time_s * 1e3:.0f} ms",
        )
