"""The verb `check`: what a configuration comes to, without running it."""

import sys
import time
from collections.abc import Iterator
from typing import Any

from inferkit.config.arguments import Arguments, program_name
from inferkit.config.check import Checked
from inferkit.config.faults import show
from inferkit.config.memory import cached_len, mib, rank_share
from inferkit.config.model_files import (
    class_name,
    is_shape_only,
)
from inferkit.config.preflight import CHECK, preflight
from inferkit.config.schema import InferenceConfig
from inferkit.config.shares import RankShare
from inferkit.core.exit_codes import EXIT_OK, EXIT_REFUSED
from inferkit.core.parallel_layout import HeadLayout, ParallelLayout, contiguous
from inferkit.inspect.groups import group_texts, ranks_text
from inferkit.runtime.launched import REFUSAL_GRACE_S, find_launched

USAGE = """\
Usage: inferkit check [FLAGS] [KEY=VALUE ...]

Looks for every fault of a command line without starting anything, and shows what the
configuration comes to: groups of ranks, heads, experts, weights and KV cache of a rank. With -m
every cell of the sweep is checked. No device and no weights are needed.

Exit code: 0 = no fault, 2 = faults, each with a command line that works."""
UNKNOWN = "known once its files are here"
WITHOUT_RANKS = ("router", "cluster")
"""Roles whose own process starts none."""

Rows = Iterator[tuple[str, str]]


def run(arguments: Arguments) -> int:
    """The pre-flight, and what the configuration comes to; told by rank 0."""
    command = arguments.command(program_name(), CHECK)
    verdict = preflight(command, arguments.space())
    launched = find_launched()
    if launched is not None and launched.rank != 0:
        if verdict.is_good:
            return EXIT_OK
        time.sleep(REFUSAL_GRACE_S)  # rank 0 must come to say why
        return EXIT_REFUSED
    if not verdict.is_good:
        print(verdict.message, file=sys.stderr)
        return EXIT_REFUSED
    for warning in verdict.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"ok: {command}")
    if verdict.is_multirun:
        print(f"  {len(verdict.cells)} cells, none of them has a fault")
    else:
        print(summary(verdict.checked[0]))
    return EXIT_OK


def summary(checked: Checked) -> str:
    """Lines of derived values of a configuration that can run."""
    cfg = checked.config
    assert cfg is not None, "only a configuration without faults has a summary"
    if cfg.role in WITHOUT_RANKS:
        rows = [*_identity(cfg), *_service(cfg)]
    else:
        rows = [*_configuration(cfg), *_ranks(cfg), *_model(cfg, checked.files.arch)]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"  {name:<{width}}{value}" for name, value in rows)


def _identity(cfg: InferenceConfig) -> Rows:
    if cfg.role is not None:
        yield "role", cfg.role
    yield "model", f"{cfg.model.name} ({class_name(cfg.model._target_)}, {cfg.model.dtype.value})"
    yield "path", _path(cfg)


def _service(cfg: InferenceConfig) -> Rows:
    """Of a role that has no ranks itself."""
    yield "request length", _length(cfg)
    yield "address", f"{cfg.router.host}, port {cfg.router.port or 'chosen at the start'}"
    if cfg.role == "cluster":
        for role in ("prefill", "decode"):
            own = getattr(cfg.cluster, f"{role}_overrides")
            text = f"+role={role} with the words of this command"
            yield f"{getattr(cfg.cluster, role)} {role}", f"{text} and {own}" if own else text
        return
    for role in ("prefill", "decode"):
        urls = getattr(cfg.router, f"{role}_urls")
        yield role, ", ".join(urls) or "those that join"


def _length(cfg: InferenceConfig) -> str:
    limit = cfg.engine.max_model_len
    return f"at most {limit} tokens" if limit else f"the context of the model, {UNKNOWN}"


def _configuration(cfg: InferenceConfig) -> Rows:
    per_rank = cfg.batch_size_per_dp_rank
    chunked = "chunked prefill" if cfg.scheduler.enable_chunked_prefill else "whole prompts"
    yield from _identity(cfg)
    yield "platform", class_name(cfg.platform._target_)
    if cfg.platform.device_memory:
        yield "device memory", f"{mib(cfg.platform.device_memory)} to plan with, for each rank"
    yield "request length", _length(cfg)
    yield "batch", f"{cfg.scheduler.batch_size} requests, batch_size_per_dp_rank={per_rank}"
    yield "step", f"{cfg.scheduler.max_prefill_tokens} tokens, {chunked}"


def _path(cfg: InferenceConfig) -> str:
    if cfg.model.path is not None:
        return show(cfg.model.path)
    return "none: the shape alone" if is_shape_only(cfg) else "none: random weights"


def _ranks(cfg: InferenceConfig) -> Rows:
    parallel = cfg.parallel
    if parallel.world_size == 1:
        yield "ranks", "1"
        return
    sizes = {name: getattr(parallel, name) for name in ("attn_dp_size", "embed_dp_size")}
    sizes["moe_ep_size"] = parallel.moe_ep_size
    text = ", ".join(f"{name}={size}" for name, size in sizes.items())
    yield "ranks", f"{parallel.world_size}: {text}"
    if len(parallel.node_ips) > 1:
        nodes = contiguous(parallel.world_size, parallel.ranks_per_node)
        yield from (
            (f"node {ip}", ranks_text(ranks))
            for ip, ranks in zip(parallel.node_ips, nodes, strict=True)
        )
    yield from group_texts(ParallelLayout.of(parallel)).items()


def _model(cfg: InferenceConfig, arch: Any) -> Rows:
    if arch is None:
        yield "weights", UNKNOWN
        yield "KV cache", UNKNOWN
        return
    share, is_alone = rank_share(cfg, arch), cfg.parallel.world_size == 1
    of_rank = "" if is_alone else " per rank"
    if share.heads is not None and not is_alone:
        yield "heads", _latent_heads(share.heads) if share.has_latent else _heads(share.heads)
    if share.num_experts:
        yield "experts", _experts(share)
    parameters = f"{int(arch.num_parameters):,} parameters" + ("" if is_alone else " in all")
    yield "weights", f"{mib(share.weight_bytes)}{of_rank} ({parameters})"
    yield "KV cache", f"{share.kv_bytes_per_token:,} bytes per token{of_rank}"
    yield "KV blocks", _blocks(cfg, share)


def _heads(heads: HeadLayout) -> str:
    query = _padded(heads.num_heads, heads.padded_heads)
    kv = _padded(heads.num_kv_heads, heads.padded_kv_heads)
    text = f"query heads {query}, {heads.num_local_heads} per rank; KV heads {kv}, "
    text += f"{heads.num_local_kv_heads} per rank"
    if heads.num_replicas > 1:
        text += f", each on {heads.num_replicas} ranks"
    return text


def _latent_heads(heads: HeadLayout) -> str:
    count = _padded(heads.num_heads, heads.padded_heads)
    return f"{count}, {heads.num_local_heads} per rank; the latent of keys and values is on all"


def _experts(share: RankShare) -> str:
    text = f"{share.num_experts} in a layer, {share.num_local_experts} per rank"
    size = share.layout.moe_tp_size
    return text if size == 1 else f"{text}, 1/{size} of each"


def _padded(count: int, padded: int) -> str:
    return f"{count}" if padded == count else f"{count} -> {padded} padded"


def _blocks(cfg: InferenceConfig, share: RankShare) -> str:
    """Memory is taken in whole blocks; the null block is one more."""
    kv_cache, num_requests = cfg.kv_cache, cfg.batch_size_per_dp_rank
    per_block = share.kv_bytes_per_token * kv_cache.block_size
    of_request = -(-cached_len(cfg, share.arch) // kv_cache.block_size)
    text = f"{of_request} of {kv_cache.block_size} tokens per request, "
    if kv_cache.num_blocks:
        return f"{text}{kv_cache.num_blocks} in the pool: {mib(kv_cache.num_blocks * per_block)}"
    kept = 2 if kv_cache.enable_prefix_cache else 1
    wanted = num_requests * of_request * kept + 1
    text += f"{wanted} for {num_requests} requests and the null block"
    return f"{text}: {mib(wanted * per_block)}"
