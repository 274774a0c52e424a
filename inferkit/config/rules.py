"""Cross-field rules: functions from a typed configuration to faults.

Each looks at a configuration whose keys exist and have the right types. Nothing here touches a
device, a network or a model's files.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inferkit.config.faults import Fault, Findings, Fix, show
from inferkit.config.load_rules import load
from inferkit.config.no_effect import no_effect
from inferkit.config.parallel_rules import context_parallel, layout, nodes
from inferkit.config.resolve import resolve_automatic
from inferkit.config.role_rules import roles
from inferkit.config.schema import (
    DatasetName,
    DecodeSchedulerConfig,
    InferenceConfig,
    ParallelConfig,
)
from inferkit.config.sweep_rules import sweeps
from inferkit.core.errors import RequestError
from inferkit.core.sampling_params import SamplingParams

DECODE_KEY = "scheduler.num_reserved_decode_tokens"
"""Only the scheduler of a decode role has it."""
EXAMPLE_DATASET = Fix(add=("data.dataset_path=/path/to/prompts.jsonl",), is_example=True)


Rule = Callable[[InferenceConfig, InferenceConfig, Findings], None]
"""Gets the configuration as composed, the same with automatic values resolved, and the list."""


def check_rules(cfg: InferenceConfig) -> Findings:
    """Apply every rule of this page."""
    findings = Findings()
    layout(cfg, findings)
    if findings.faults:
        # Sizes that divide nothing would break the arithmetic of the other rules.
        cfg = replace(cfg, parallel=ParallelConfig())
    resolved = resolve_automatic(cfg)
    for rule in RULES:
        rule(cfg, resolved, findings)
    return findings


@dataclass(frozen=True, kw_only=True)
class Range:
    """Values that a number may have."""

    key: str
    text: str
    """The range, as a user reads it."""
    holds: Callable[[Any], bool]
    use: Any
    """A value that does, for the corrected command line."""
    is_offline: bool = False
    """In a role 0 will do too."""


RANGES = (
    Range(key="data.input_truncated_len", text=">= 1", holds=lambda n: n >= 1, use=256),
    Range(
        key="data.limit", text=">= 1, or null for all", holds=lambda n: n is None or n >= 1, use=1
    ),
    Range(
        key="engine.max_model_len",
        text="0 (automatic) or >= 2",
        holds=lambda n: n == 0 or n >= 2,
        use=0,
    ),
    Range(key="kv_cache.block_size", text=">= 1", holds=lambda n: n >= 1, use=128),
    Range(
        key="kv_cache.mem_fraction",
        text="> 0 and <= 1",
        holds=lambda share: 0 < share <= 1,
        use=0.85,
    ),
    Range(
        key="kv_cache.num_blocks",
        text="0 (automatic) or >= 2 (block 0 is the null block)",
        holds=lambda n: n == 0 or n >= 2,
        use=0,
    ),
    Range(key="scheduler.batch_size", text="0 (automatic) or >= 1", holds=lambda n: n >= 0, use=0),
    Range(
        key="scheduler.max_new_tokens",
        text=">= 1, or in a role 0 (to the end of the context)",
        holds=lambda n: n >= 1,
        use=32,
        is_offline=True,
    ),
    Range(
        key="scheduler.max_prefill_tokens",
        text="0 (automatic) or >= 1",
        holds=lambda n: n >= 0,
        use=0,
    ),
    Range(
        key="kv_cache.host_bytes",
        text="0 (a quarter of the pool) or a number of bytes",
        holds=lambda n: n >= 0,
        use=0,
    ),
    Range(key="scheduler.num_reserved_decode_tokens", text=">= 0", holds=lambda n: n >= 0, use=64),
    Range(key="platform.num_threads", text="0 (automatic) or >= 1", holds=lambda n: n >= 0, use=0),
    Range(
        key="platform.device_memory",
        text="0 (ask the device) or a number of bytes",
        holds=lambda n: n >= 0,
        use=0,
    ),
)


def ranges(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    for limits in RANGES:
        if limits.key == DECODE_KEY and not isinstance(cfg.scheduler, DecodeSchedulerConfig):
            continue
        value = value_at(cfg, limits.key)
        if cfg.role is not None and limits.is_offline and value == 0:
            continue
        if not limits.holds(value):
            problem = f"is out of range; allowed is {limits.text}"
            findings.refuse(limits.key, value, problem, use=limits.use)


def sampling(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    """The ranges are those of SamplingParams, which a request has too."""
    values = {
        name: getattr(cfg.data, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")
    }
    defaults = type(cfg.data)()
    for name, value in values.items():
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            problem = str(error).partition(f"{name}={show(value)}")[2].strip() or str(error)
            findings.refuse(f"data.{name}", value, problem, use=getattr(defaults, name) or 0)


def lengths(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    """engine.max_model_len against what a prompt and its output need."""
    limit, data, scheduler = cfg.engine.max_model_len, cfg.data, cfg.scheduler
    if limit < 2 or cfg.role is not None:
        return  # automatic, or out of range; in a role every request brings its own lengths
    whole = data.input_truncated_len + scheduler.max_new_tokens
    key, related = "engine.max_model_len", ("data.input_truncated_len", "scheduler.max_new_tokens")
    if limit <= scheduler.max_new_tokens:
        problem = (
            f"leaves no room for a prompt beside scheduler.max_new_tokens="
            f"{scheduler.max_new_tokens}; allowed is >= {scheduler.max_new_tokens + 1}"
        )
        findings.refuse(key, limit, problem, use=whole, related=related)
    elif scheduler.fixed_steps and limit < whole:
        problem = (
            f"cannot hold data.input_truncated_len={data.input_truncated_len} and "
            f"scheduler.max_new_tokens={scheduler.max_new_tokens}, which scheduler.fixed_steps "
            f"always runs; allowed is >= {whole}"
        )
        findings.refuse(key, limit, problem, use=whole, related=related)


def batches(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    scheduler, dp_size = resolved.scheduler, resolved.parallel.attn_dp_size
    related = ("parallel.world_size", "parallel.attn_tp_size")
    if scheduler.batch_size % dp_size:
        nearest = scheduler.batch_size // dp_size * dp_size or dp_size
        problem = f"must be a multiple of attn_dp_size={dp_size}, the data-parallel ranks"
        findings.refuse(
            "scheduler.batch_size", scheduler.batch_size, problem, use=nearest, related=related
        )
    asked = cfg.scheduler.max_prefill_tokens
    per_rank = scheduler.batch_size // dp_size
    if asked < 1:
        return
    related = ("scheduler.batch_size", "parallel.world_size")
    if scheduler.enable_chunked_prefill and asked <= per_rank:
        problem = (
            f"leaves no room for a prompt beside {per_rank} decoding requests; "
            f"allowed is > {per_rank} or 0 (automatic)"
        )
        findings.refuse("scheduler.max_prefill_tokens", asked, problem, use=0, related=related)
    elif (
        not scheduler.enable_chunked_prefill
        and cfg.role is None
        and asked < cfg.data.input_truncated_len
    ):
        findings.warn(
            "scheduler.max_prefill_tokens",
            asked,
            "without chunked prefill, longer prompts are refused; "
            f"data.input_truncated_len={cfg.data.input_truncated_len} lets them through to it",
        )


def batch_buckets(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    buckets = cfg.exe_mode.batch_buckets
    if any(size < 1 for size in buckets) or buckets != sorted(set(buckets)):
        fixed = sorted({size for size in buckets if size >= 1})
        problem = "must be sizes >= 1 that rise, such as '[1,2,4,8]'"
        findings.refuse("exe_mode.batch_buckets", buckets, problem, use=fixed)


def dataset(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    name, path = cfg.data.dataset, cfg.data.dataset_path
    if cfg.role is not None:
        return  # prompts come by HTTP
    key, related = "data.dataset_path", ("data.dataset",)
    if name is DatasetName.default and path is not None:
        formats = ", ".join(f"data.dataset={n.name}" for n in DatasetName if n is not name)
        problem = "has no effect with data.dataset=default; name the format of the file: "
        fix = Fix(add=(f"data.dataset={DatasetName.jsonl.name}",))
        findings.refuse(key, path, problem + formats, fix=fix, related=related)
    elif name is DatasetName.default:
        return
    elif path is None:
        problem = f"has no value, which data.dataset={name.name} needs; set {key}=... (a .jsonl "
        problem += "file, or a folder of them)"
        findings.faults.append(
            Fault(key=key, problem=problem, fix=EXAMPLE_DATASET, related=related)
        )
    elif not Path(path).expanduser().exists():
        problem = f"does not exist\nlooked in {Path.cwd()}"
        findings.refuse(key, path, problem, fix=EXAMPLE_DATASET, related=related)
    elif Path(path).expanduser().is_dir() and not any(Path(path).expanduser().glob("*.jsonl")):
        problem = "is a folder without .jsonl files"
        findings.refuse(key, path, problem, fix=EXAMPLE_DATASET, related=related)


def speculation(cfg: InferenceConfig, resolved: InferenceConfig, findings: Findings) -> None:
    """Draft tokens of multi-token prediction."""
    problem = "needs a model with a draft head; no model of this version has one"
    if cfg.model.next_n != 0:
        findings.refuse("model.next_n", cfg.model.next_n, problem, use=0)
    if cfg.model.mtp_target is not None:
        findings.refuse("model.mtp_target", cfg.model.mtp_target, problem, drop=True)


RULES: tuple[Rule, ...] = (
    ranges,
    nodes,
    context_parallel,
    sampling,
    lengths,
    batches,
    batch_buckets,
    dataset,
    roles,
    sweeps,
    load,
    speculation,
    no_effect,
)


def value_at(cfg: Any, key: str) -> Any:
    """`value_at(cfg, "scheduler.batch_size")`."""
    for name in key.split("."):
        cfg = getattr(cfg, name)
    return cfg
