"""Rules of a sweep's objective and limits, and what is known of metrics by their names.

A metric is named as in metrics.json, with dots: `ttft_s.p50`. The figures below `goodput` are not
in that file: the summary of a sweep derives them.
"""

import math
from dataclasses import fields

from inferkit.config.faults import Findings, Fix, closest, did_you_mean
from inferkit.config.schema import InferenceConfig, SloConfig

GOODPUT = "goodput"
GOODPUT_PER_DEVICE = "goodput_per_device"
SLO_ATTAINMENT = "slo_attainment"
TOKENS_PER_S = "output_tokens_per_s"
TOKENS_PER_S_PER_DEVICE = "output_tokens_per_s_per_device"
OF_SLO = (GOODPUT, GOODPUT_PER_DEVICE, SLO_ATTAINMENT)
"""Known where a limit of sweep.slo is set."""

HIGHER_IS_BETTER = (
    TOKENS_PER_S,
    TOKENS_PER_S_PER_DEVICE,
    *OF_SLO,
    "prompt_tokens_per_s",
    "total_tokens_per_s",
    "request_per_s",
    "prefix_cache_hit_rate",
)
STATISTICS = ("mean", "p50", "p90", "p99")
STEP_KINDS = ("prefill", "decode", "mixed")
TIMES = ("ttft_s", "tpot_s", "e2e_s", "queue_s", "send_delay_s")
LOWER_IS_BETTER = (
    *(f"{name}.{part}" for name in TIMES for part in STATISTICS),
    *(
        f"steps.{kind}.{name}.{part}"
        for kind in STEP_KINDS
        for name in ("step_time_s", "inference_time_s")
        for part in STATISTICS
    ),
    "wall_time_s",
    "load_time_s",
    "steady_decode_mean_s",
    "collective_share",
    "num_steps",
    "num_failed",
    "num_preemptions",
    "kv_blocks_used_max",
    "peak_memory_bytes",
    "expert_load.imbalance",
)
METRICS = (*HIGHER_IS_BETTER, *LOWER_IS_BETTER)
"""Names of metrics of which more, or less, is better."""
OWN_RUNNERS = "inferkit."
"""Runners whose metrics are known; a user's own has those that it likes."""


def is_higher_better(metric: str) -> bool:
    """Of a metric that nobody knows: times and sizes are better small."""
    if metric in METRICS:
        return metric in HIGHER_IS_BETTER
    name = metric.partition(".")[0]
    return name.endswith("_per_s") or not name.endswith(("_s", "_ms", "_bytes"))


def has_slo(slo: SloConfig) -> bool:
    """A limit is set."""
    return bool(slo_limits(slo))


def slo_limits(slo: SloConfig) -> dict[str, float]:
    """The limits that are set, in seconds."""
    values = {field.name: getattr(slo, field.name) for field in fields(slo)}
    return {name: value for name, value in values.items() if value is not None}


def objective_of(cfg: InferenceConfig) -> str:
    """The metric by which the best cell is chosen."""
    return cfg.sweep.objective or (GOODPUT if has_slo(cfg.sweep.slo) else TOKENS_PER_S)


def sweeps(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    """sweep.slo, sweep.objective and sweep.cell_timeout_s."""
    _limits(cfg, findings)
    _objective(cfg, findings)


def _limits(cfg: InferenceConfig, findings: Findings) -> None:
    limits = {f"sweep.slo.{name}": value for name, value in slo_limits(cfg.sweep.slo).items()}
    if cfg.sweep.cell_timeout_s is not None:
        limits["sweep.cell_timeout_s"] = cfg.sweep.cell_timeout_s
    for key, value in limits.items():
        if not 0 < value < math.inf:
            problem = "is out of range; allowed is a number of seconds > 0, or null for no limit"
            findings.refuse(key, value, problem, drop=True)


def _objective(cfg: InferenceConfig, findings: Findings) -> None:
    key, objective = "sweep.objective", cfg.sweep.objective
    if objective is None:
        return
    if objective in OF_SLO and not has_slo(cfg.sweep.slo):
        names = ", ".join(f"sweep.slo.{field.name}" for field in fields(cfg.sweep.slo))
        problem = f"needs a limit that a good request must keep; set one or more of {names}"
        fix = Fix(add=("sweep.slo.ttft_s=1.0",), is_example=True)
        findings.refuse(key, objective, problem, fix=fix)
    elif objective not in METRICS and cfg.runner._target_.startswith(OWN_RUNNERS):
        guess = _meant(objective)
        problem = (
            "is no metric of a run that can be better or worse; names are those of metrics.json, "
            f"such as {TOKENS_PER_S}, ttft_s.p50, tpot_s.p99, and {GOODPUT}{did_you_mean(guess)}"
        )
        findings.refuse(key, objective, problem, use=guess or TOKENS_PER_S)


def _meant(objective: str) -> str | None:
    """`ttft` -> `ttft_s.p50`: a group of statistics alone stands for its middle."""
    name = objective.partition(".")[0]
    groups: set[str] = {metric.partition(".")[0] for metric in METRICS if metric.endswith(".p50")}
    group = closest(name, groups - {"steps"}, cutoff=0.75)
    if objective in groups:
        return f"{objective}.p50"
    direct = closest(objective, METRICS, cutoff=0.7)
    if direct is not None and (group is None or direct.startswith(group)):
        return direct
    return f"{group}.p50" if group is not None else closest(objective, METRICS)
