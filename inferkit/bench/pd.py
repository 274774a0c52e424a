"""What the hand-off adds to the time to the first token: prefill/decode over one instance.

    python -m inferkit.bench.pd [--rounds 5] [--requests 8] [--concurrency 1] [--prompt-len 64]
                                [--output-len 8] [override ...]

`+role=serve` and `+role=cluster` run side by side with equal overrides and get equal streams of
requests, in turn, so that a busy minute hits both. Times are those of the client: from the moment
it sends a request to the first token of the answer, with router.first_token=decode only after the
hand-off. Prompts differ from their first token on, so no prefix cache helps. One thread computes in
every process, unless an override gives platform.num_threads: the roles of a cluster share the
cores of a host, and the hand-off is what is to be measured.

A ratio is the median over rounds of the cluster's median over that of the instance in the same
round; added milliseconds are the median of their differences. On a machine that others use, every
switch of processes waits for them; what remains of that is least in the quickest requests, whose
difference is `added_best_ms`. Memory that is used for the first time costs more, on both sides of a
hand-off: of a small pool (kv_cache.num_blocks) the warm-up has used all blocks. The last line of
stdout is one JSON object.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from inferkit.bench.load.client import LoadClient, Outcome
from inferkit.bench.load.service import Service, started
from inferkit.bench.load.workload import make_requests
from inferkit.config.compose import load_config
from inferkit.core.errors import InferkitError, RequestError

ROLES = {"serve": "disagg.http_port=0", "cluster": "router.port=0"}
"""What is compared -> the override that makes it choose a free port."""
ONE_THREAD = "platform.num_threads"
MS = ("serve_ms", "cluster_ms", "added_ms", "added_best_ms")
START_LIMIT_S = 600.0
REQUEST_LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one request, as its client sees it."""

    ttft_s: float
    tpot_s: float
    """Mean time between tokens after the first."""


def main() -> None:
    args = _parse(sys.argv[1:])
    console = Console(stderr=True)
    overrides = list(args.overrides)
    if not any(word.lstrip("+").startswith(f"{ONE_THREAD}=") for word in overrides):
        overrides.append(f"{ONE_THREAD}=1")
    try:
        for role, port in ROLES.items():
            load_config([f"+role={role}", port, *overrides])
        with tempfile.TemporaryDirectory(prefix="inferkit-pd-") as folder:
            rounds = asyncio.run(_rounds(Path(folder), overrides, args, console))
    except InferkitError as error:
        sys.exit(f"inferkit: {error}")
    report = {
        "workload": {
            "rounds": args.rounds,
            "requests": args.requests,
            "concurrency": args.concurrency,
            "prompt_len": args.prompt_len,
            "output_len": args.output_len,
            "overrides": overrides,
        },
        **summary(rounds["serve"], rounds["cluster"]),
    }
    console.print(_table(report))
    print(json.dumps(report))


async def _rounds(
    folder: Path, overrides: Sequence[str], args: argparse.Namespace, console: Console
) -> dict[str, list[list[Times]]]:
    """Role -> rounds, each with the times of its requests.

    Raises:
        InferkitError: a service could not be started, or a request failed.
    """
    rounds: dict[str, list[list[Times]]] = {role: [] for role in ROLES}
    async with contextlib.AsyncExitStack() as stack:
        services: dict[str, tuple[Service, LoadClient]] = {}
        for role, port in ROLES.items():
            console.print(f"starts +role={role}")
            service = await stack.enter_async_context(
                started(
                    [f"+role={role}", port, *overrides],
                    run_dir=folder / role,
                    log=folder / f"{role}.log",
                    tell=lambda text: None,
                    start_limit_s=START_LIMIT_S,
                )
            )
            client = LoadClient(service.url, timeout_s=REQUEST_LIMIT_S)
            services[role] = service, await stack.enter_async_context(client)
        vocab_size = await services["serve"][1].vocab_size()
        for number in range(args.rounds + 1):
            # The first one makes connections and fills caches; it does not count.
            console.print(f"round {number}/{args.rounds}" if number else "warms up")
            for turn, (role, (service, client)) in enumerate(services.items()):
                requests = make_requests(
                    args.requests,
                    prompt_len=args.prompt_len,
                    output_len=args.output_len,
                    vocab_size=vocab_size,
                    seed=(number * len(ROLES) + turn) * args.requests,
                )
                work = client.put(requests, concurrency=args.concurrency)
                times = [_times_of(outcome, role) for outcome in await service.during(work)]
                if number:
                    rounds[role].append(times)
    return rounds


def _times_of(outcome: Outcome, role: str) -> Times:
    if not outcome.is_ok or outcome.ttft_s is None:
        raise RequestError(f"+role={role} fails: {outcome.error}")
    return Times(ttft_s=outcome.ttft_s, tpot_s=outcome.tpot_s or 0.0)


def summary(serve: Sequence[Sequence[Times]], cluster: Sequence[Sequence[Times]]) -> dict[str, Any]:
    """Of rounds, each with the times of its requests."""
    result: dict[str, Any] = {}
    for name in ("ttft", "tpot"):
        ones, others = (
            [statistics.median(getattr(times, f"{name}_s") for times in one) for one in rounds]
            for rounds in (serve, cluster)
        )
        best_one, best_other = (
            min(getattr(times, f"{name}_s") for one in rounds for times in one)
            for rounds in (serve, cluster)
        )
        pairs = list(zip(ones, others, strict=True))
        ratios = [other / one for one, other in pairs if one]
        result[name] = {
            "serve_ms": 1000 * statistics.median(ones),
            "cluster_ms": 1000 * statistics.median(others),
            "added_ms": 1000 * statistics.median(other - one for one, other in pairs),
            "added_best_ms": 1000 * (best_other - best_one),
            "ratio": statistics.median(ratios) if ratios else None,
            "ratio_min": min(ratios, default=None),
            "ratio_max": max(ratios, default=None),
        }
    return result


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m inferkit.bench.pd",
        description="Compare the time to the first token of +role=cluster and +role=serve.",
    )
    parser.add_argument("--rounds", type=_at_least_one, default=5)
    parser.add_argument("--requests", type=_at_least_one, default=8, help="of each round")
    parser.add_argument("--concurrency", type=_at_least_one, default=1, help="at the same time")
    parser.add_argument("--prompt-len", type=_at_least_one, default=64, help="tokens of a prompt")
    parser.add_argument("--output-len", type=_at_least_one, default=8, help="tokens of an answer")
    parser.add_argument("overrides", nargs="*", help="configuration overrides of both")
    return parser.parse_args(argv)


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range; allowed is >= 1")
    return number


def _table(report: dict[str, Any]) -> Table:
    table = Table()
    for column in ("", "serve ms", "cluster ms", "added ms", "best", "ratio", "min..max"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name in ("ttft", "tpot"):
        row = report[name]
        ratios = ["-", "-"]
        if row["ratio"] is not None:
            ratios = [f"{row['ratio']:.2f}", f"{row['ratio_min']:.2f}..{row['ratio_max']:.2f}"]
        times = [f"{row[key]:.2f}" for key in MS]
        table.add_row(name.upper(), *times, *ratios)
    return table


if __name__ == "__main__":
    main()
