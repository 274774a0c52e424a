"""The same workload through inferkit and through `transformers` generate, in turn.

    python -m inferkit.bench.vs_transformers [--rounds 3] [--prompts 1,32] [--prompt-len 128]
                                             [--output-len 128] [override ...]

Each side lives in a process of its own and waits while the other runs. Both get the same random
token ids, generate greedily and ignore EOS; transformers runs all prompts as one batch. A ratio is
the median over rounds of the two measurements of that round; above 1 inferkit is better. The last
line of stdout is one JSON object.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console
from rich.table import Table

from inferkit.core.errors import InferkitError
from inferkit.runtime.worker_group import let_threads_sleep

WARM_UP_TOKENS = 4
METRICS = ("tokens_per_s", "ttft_s", "tpot_s", "peak_memory_bytes")
HIGHER_IS_BETTER = {"tokens_per_s"}


def main() -> None:
    args = _parse(sys.argv[1:])
    console = Console(stderr=True)
    report: dict[str, Any] = {"overrides": args.overrides, "workloads": []}
    for num_prompts in args.prompts:
        try:
            _config({"num_prompts": num_prompts, "prompt_len": 1, "output_len": 1}, args.overrides)
        except InferkitError as error:
            sys.exit(f"inferkit: {error}")
    for num_prompts in args.prompts:
        workload = {
            "num_prompts": num_prompts,
            "prompt_len": args.prompt_len,
            "output_len": args.output_len,
        }
        rounds = _alternate(workload, args.rounds, args.overrides, console)
        report["workloads"].append(workload | {"rounds": rounds, "ratios": _ratios(rounds)})
        console.print(_table(report["workloads"][-1]))
    print(json.dumps(report))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m inferkit.bench.vs_transformers",
        description="Compare inferkit with transformers generate on this machine.",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--prompts", type=lambda text: [int(n) for n in text.split(",")], default=[1, 32]
    )
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    return parser.parse_args(argv)


def _alternate(
    workload: dict[str, int], num_rounds: int, overrides: list[str], console: Console
) -> list[dict[str, dict[str, float]]]:
    let_threads_sleep()  # for both sides alike
    context = multiprocessing.get_context("spawn")
    sides: dict[str, Connection] = {}
    processes = []
    for name, serve in (("inferkit", _serve_inferkit), ("transformers", _serve_transformers)):
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(workload, overrides, there), daemon=True)
        process.start()
        there.close()
        here.recv()  # loaded and warm
        sides[name] = here
        processes.append(process)
    rounds = []
    for number in range(num_rounds):
        results = {}
        # Swap who goes first, so that neither always runs on the warmer machine.
        for name in sorted(sides, reverse=bool(number % 2)):
            console.print(f"round {number + 1}/{num_rounds}: {name} {workload}")
            sides[name].send("run")
            results[name] = sides[name].recv()
        rounds.append(results)
    for connection in sides.values():
        connection.send("end")
    for process in processes:
        process.join(timeout=30)
    return rounds


def _ratios(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    ratios = {}
    for metric in METRICS:
        values = []
        for results in rounds:
            ours, theirs = results["inferkit"][metric], results["transformers"][metric]
            values.append(ours / theirs if metric in HIGHER_IS_BETTER else theirs / ours)
        ratios[metric] = {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
    return ratios


def _table(workload: dict[str, Any]) -> Table:
    table = Table(
        title=f"{workload['num_prompts']} x ({workload['prompt_len']} prompt + "
        f"{workload['output_len']} new tokens), median of {len(workload['rounds'])} rounds"
    )
    for column in ("metric", "inferkit", "transformers", "ratio", "min..max"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric in METRICS:
        ours, theirs = (
            statistics.median(results[side][metric] for results in workload["rounds"])
            for side in ("inferkit", "transformers")
        )
        ratio = workload["ratios"][metric]
        table.add_row(
            metric,
            f"{ours:,.4g}",
            f"{theirs:,.4g}",
            f"{ratio['median']:.2f}",
            f"{ratio['min']:.2f}..{ratio['max']:.2f}",
        )
    return table


def _prompts(workload: dict[str, int], vocab_size: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (workload["num_prompts"], workload["prompt_len"])
    ids: list[list[int]] = torch.randint(3, vocab_size, shape, generator=generator).tolist()
    return ids


def _result(
    total_s: float, ttfts: list[float], tpots: list[float], workload: dict[str, int]
) -> Any:
    num_tokens = workload["num_prompts"] * workload["output_len"]
    return {
        "tokens_per_s": num_tokens / total_s,
        "ttft_s": statistics.mean(ttfts),
        "tpot_s": statistics.mean(tpots),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _config(workload: dict[str, int], overrides: list[str]) -> Any:
    from inferkit.config.compose import load_config

    return load_config(
        [
            f"data.input_truncated_len={workload['prompt_len']}",
            f"scheduler.max_new_tokens={workload['output_len']}",
            f"scheduler.batch_size={workload['num_prompts']}",
            *overrides,
        ]
    )


def _serve_inferkit(workload: dict[str, int], overrides: list[str], connection: Connection) -> None:
    from inferkit.core.sampling_params import SamplingParams
    from inferkit.offline.inference import OfflineInference

    llm = OfflineInference(_config(workload, overrides))
    prompts = _prompts(workload, llm.parts.arch.vocab_size)

    def params(num_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)

    llm.generate(prompts, params(WARM_UP_TOKENS))
    connection.send("ready")
    while connection.recv() == "run":
        start_s = time.perf_counter()
        llm.generate(prompts, params(workload["output_len"]))
        total_s = time.perf_counter() - start_s
        times = [[request.arrival_time_s, *request.token_times_s] for request in llm.requests]
        connection.send(
            _result(
                total_s,
                [t[1] - t[0] for t in times],
                [(t[-1] - t[1]) / max(1, len(t) - 2) for t in times],
                workload,
            )
        )


def _serve_transformers(
    workload: dict[str, int], overrides: list[str], connection: Connection
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from inferkit.loader.source import resolve_source
    from inferkit.platforms.cpu import usable_cores

    config = _config(workload, overrides)
    torch.set_num_threads(config.platform.num_threads or usable_cores())
    model = AutoModelForCausalLM.from_pretrained(
        resolve_source(config.model.path).directory,
        dtype=getattr(torch, config.model.dtype.value),
    ).eval()
    input_ids = torch.tensor(_prompts(workload, model.config.vocab_size))

    def generate(num_tokens: int) -> list[float]:
        """Returns the time of each token."""
        times: list[float] = []

        def note_time(ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            stopping_criteria=[note_time],
        )
        return times

    generate(WARM_UP_TOKENS)
    connection.send("ready")
    while connection.recv() == "run":
        start_s = time.perf_counter()
        times = generate(workload["output_len"])
        total_s = time.perf_counter() - start_s
        tpot_s = (times[-1] - times[0]) / max(1, len(times) - 1)
        connection.send(_result(total_s, [times[0] - start_s], [tpot_s], workload))


if __name__ == "__main__":
    main()
