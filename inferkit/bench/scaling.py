"""How one workload scales over parallel splits on this machine, by the command that users run.

    python -m inferkit.bench.scaling [--splits tp1,tp2,dp2,dp2tp2] [--rounds 2] [--prompts 8]
                                     [--prompt-len 64] [--output-len 32] [override ...]

Every round runs all splits in turn, so that a busy minute hits all of them. A ratio is the median
over rounds of a split's output tokens/s over that of the first split in the same round. The share
of collectives is of the time of all steps, waiting for other ranks included. The last line of
stdout is one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from inferkit.config.compose import load_config
from inferkit.core.errors import InferkitError

WORDS = ("river", "stone", "cloud", "light", "house", "green", "seven", "north")


def main() -> None:
    args = _parse(sys.argv[1:])
    console = Console(stderr=True)
    splits = args.splits.split(",")
    for split in splits:
        try:
            load_config([f"parallel={split}", *args.overrides])
        except InferkitError as error:
            sys.exit(f"inferkit: {error}")
    results: dict[str, list[dict[str, Any]]] = {split: [] for split in splits}
    with tempfile.TemporaryDirectory(prefix="inferkit-scaling-") as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text(_prompts(args.prompts, args.prompt_len), "utf-8")
        for number in range(args.rounds):
            for split in splits:
                console.print(f"round {number + 1}/{args.rounds}: parallel={split}")
                run_dir = Path(folder) / f"{split}-{number}"
                results[split].append(_run(split, prompts, run_dir, args))
    summaries = [_summary(split, results[split], results[splits[0]]) for split in splits]
    report = {
        "workload": {
            "prompts": args.prompts,
            "prompt_len": args.prompt_len,
            "output_len": args.output_len,
            "rounds": args.rounds,
            "overrides": args.overrides,
        },
        "splits": summaries,
    }
    console.print(_table(summaries, splits[0]))
    print(json.dumps(report))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m inferkit.bench.scaling",
        description="Run one workload at several parallel splits and compare.",
    )
    parser.add_argument("--splits", default="tp1,tp2,dp2", help="options of the group parallel")
    parser.add_argument("--rounds", type=_at_least_one, default=2)
    parser.add_argument("--prompts", type=_at_least_one, default=8)
    parser.add_argument("--prompt-len", type=_at_least_one, default=64)
    parser.add_argument("--output-len", type=_at_least_one, default=32)
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    return parser.parse_args(argv)


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range; allowed is >= 1")
    return number


def _prompts(num_prompts: int, num_words: int) -> str:
    """Prompts of at least `num_words` tokens, which the run cuts to `prompt-len`."""
    lines = []
    for prompt in range(num_prompts):
        words = [WORDS[(prompt + idx * (prompt + 1)) % len(WORDS)] for idx in range(num_words)]
        lines.append(json.dumps({"prompt": " ".join(words)}))
    return "\n".join(lines) + "\n"


def _run(split: str, prompts: Path, run_dir: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The metrics of one run; every request takes exactly `output_len` steps."""
    command = [
        sys.executable,
        "-m",
        "inferkit",
        f"parallel={split}",
        "data.dataset=jsonl",
        f"data.dataset_path={prompts}",
        f"data.input_truncated_len={args.prompt_len}",
        f"scheduler.max_new_tokens={args.output_len}",
        "scheduler.fixed_steps=true",
        f"hydra.run.dir={run_dir}",
        *args.overrides,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"parallel={split} failed with exit code {done.returncode}:\n{done.stderr}")
    metrics: dict[str, Any] = json.loads((run_dir / "metrics.json").read_text("utf-8"))
    return metrics


def _summary(split: str, runs: list[dict[str, Any]], first: list[dict[str, Any]]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    ratios = [
        run["output_tokens_per_s"] / base["output_tokens_per_s"]
        for run, base in zip(runs, first, strict=True)
    ]
    return {
        "split": split,
        "num_ranks": load_config([f"parallel={split}"]).parallel.world_size,
        "steps_per_s": median([run["num_steps"] / run["wall_time_s"] for run in runs]),
        "output_tokens_per_s": median([run["output_tokens_per_s"] for run in runs]),
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "collective_share": median([run["collective_share"] for run in runs]),
    }


def _table(rows: list[dict[str, Any]], first: str) -> Table:
    table = Table()
    columns = ("parallel", "ranks", "steps/s", "tokens/s", f"x {first}", "min..max", "collectives")
    for column in columns:
        justify: Any = "left" if column == "parallel" else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(
            row["split"],
            str(row["num_ranks"]),
            f"{row['steps_per_s']:.2f}",
            f"{row['output_tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_min']:.2f}..{row['ratio_max']:.2f}",
            f"{row['collective_share']:.0%}",
        )
    return table


if __name__ == "__main__":
    main()
