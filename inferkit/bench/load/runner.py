"""`runner=load`: starts the service of the configuration, loads it, measures, and stops it.

Imports nothing that generates: the model runs in the processes of the service.
"""

import asyncio
import json
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, TypeVar

from inferkit.bench.load.client import LoadClient, Outcome
from inferkit.bench.load.metrics import collect_load_metrics
from inferkit.bench.load.progress import LoadProgress
from inferkit.bench.load.service import START_LIMIT_S, Service, started
from inferkit.bench.load.summary import print_load_summary
from inferkit.bench.load.words import count_pairs, count_ranks, load_text, service_words
from inferkit.bench.load.workload import make_requests
from inferkit.config.provenance import record, write_json
from inferkit.config.schema import InferenceConfig
from inferkit.core.errors import RequestError
from inferkit.online.cluster.runner import typed_arguments
from inferkit.runtime.live_progress import live_progress

T = TypeVar("T")

REQUESTS_FILE = "requests.jsonl"
SERVICE_DIR = "service"
WARM_UP_LEN = 4
"""Tokens of an answer before the load."""
ANSWER_MARGIN_S = 60.0
"""The service gives a request up itself, and says so, so long before this client would."""


class LoadRunner:
    """Puts the load of the `load` node on a service of its own and leaves a run directory.

    metrics.json, requests.jsonl (one line per request, as they end), service.log and service/, the
    run directory of the service.

    Args:
        start_limit_s: how long the service may take until it is ready.
    """

    def __init__(self, *, start_limit_s: float = START_LIMIT_S) -> None:
        self.start_limit_s = start_limit_s

    def run(self, config: InferenceConfig, *, run_dir: Path) -> dict[str, Any]:
        """Returns the metrics of the load.

        Raises:
            ConfigError: the command line of this run is not known, or its cluster cannot be.
            WorkerError: the service could not be started, or died.
            RequestError: every request failed.
            SystemExit: SIGTERM came; the service has ended.
        """
        arguments = typed_arguments(run_dir)
        words = service_words(arguments, config)
        num_devices = count_ranks(arguments, config)
        with live_progress() as live, (run_dir / REQUESTS_FILE).open("w") as file:
            work = self._measure(config, words, run_dir, LoadProgress(live), file)
            outcomes, times = asyncio.run(_ended_by_sigterm(work))
        metrics = collect_load_metrics(
            outcomes,
            has_rate=config.load.rate is not None,
            num_devices=num_devices,
            **times,
        )
        write_json(run_dir / "metrics.json", metrics)
        text = load_text(config.load)
        print_load_summary(metrics, outcomes, load=text, run_dir=run_dir)
        if metrics["num_failed"] == metrics["num_requests"]:
            raise RequestError(
                f"all {metrics['num_requests']} requests failed; the first: {outcomes[0].error}"
            )
        return metrics

    async def _measure(
        self,
        config: InferenceConfig,
        words: Sequence[str],
        run_dir: Path,
        progress: LoadProgress,
        file: TextIO,
    ) -> tuple[list[Outcome], dict[str, float]]:
        """What became of the requests; seconds that the service took to start, and that this
        process computed during the load."""
        load = config.load
        start_s = time.monotonic()
        async with started(
            words,
            run_dir=run_dir / SERVICE_DIR,
            log=run_dir / f"{SERVICE_DIR}.log",
            tell=progress.tell,
            num_pairs=count_pairs(config),
            start_limit_s=self.start_limit_s,
        ) as service:
            load_time_s = time.monotonic() - start_s
            record(run_dir, url=service.url)
            timeout_s = config.router.request_timeout_s + ANSWER_MARGIN_S
            async with LoadClient(service.url, timeout_s=timeout_s) as client:
                vocab_size = await client.vocab_size()
                await self._warm_up(config, service, client, vocab_size, progress)
                requests = make_requests(
                    load.num_requests,
                    prompt_len=load.prompt_len,
                    output_len=load.output_len,
                    vocab_size=vocab_size,
                    seed=load.seed,
                    rate=load.rate,
                )
                progress.begin("load", len(requests))

                def on_outcome(outcome: Outcome) -> None:
                    file.write(json.dumps(asdict(outcome)) + "\n")
                    progress.on_outcome(outcome)

                concurrency = load.concurrency if load.rate is None else None
                start_cpu_s = time.process_time()
                outcomes = await service.during(
                    client.put(
                        requests,
                        concurrency=concurrency,
                        on_sent=progress.on_sent,
                        on_outcome=on_outcome,
                    )
                )
                client_cpu_s = time.process_time() - start_cpu_s
            progress.stop()
        failure = service.failure()
        if failure is not None and not all(outcome.is_ok for outcome in outcomes):
            raise failure  # which is why they failed
        return outcomes, {"load_time_s": load_time_s, "client_cpu_s": client_cpu_s}

    async def _warm_up(
        self,
        config: InferenceConfig,
        service: Service,
        client: LoadClient,
        vocab_size: int,
        progress: LoadProgress,
    ) -> None:
        """As many requests at the same time as the load has in flight: memory, caches, connections
        and compiled shapes are there when it begins."""
        load = config.load
        num_requests = min(load.num_requests, load.concurrency)
        requests = make_requests(
            num_requests,
            prompt_len=load.prompt_len,
            output_len=min(load.output_len, WARM_UP_LEN),
            vocab_size=vocab_size,
            seed=load.seed + load.num_requests,
        )
        progress.begin("warming up", num_requests)
        await service.during(
            client.put(
                requests,
                concurrency=num_requests,
                on_sent=progress.on_sent,
                on_outcome=progress.on_outcome,
            )
        )


async def _ended_by_sigterm(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which SIGTERM breaks off like Ctrl-C, so that it cleans up."""
    received: list[int] = []
    task = asyncio.create_task(work)

    def end() -> None:
        received.append(signal.SIGTERM)
        task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
