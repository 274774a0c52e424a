"""What a configuration comes to, in the lines that `check` shows."""

from collections.abc import Iterator, Mapping, Sequence

from inferkit.config.check import Checked
from inferkit.config.cluster_roles import CLUSTER, INSTANCES
from inferkit.config.faults import show
from inferkit.config.memory import mib
from inferkit.config.model_files import class_name, is_shape_only
from inferkit.config.schema import InferenceConfig
from inferkit.core.parallel_layout import contiguous
from inferkit.inspect.derived import WITHOUT_RANKS, derived_of, derived_values
from inferkit.inspect.groups import ALONE, ranks_text
from inferkit.inspect.snapshot import Derived
from inferkit.inspect.wording import derived_text

UNKNOWN = "known once its files are here"

Row = tuple[str, str]


def summary(checked: Checked) -> str:
    """Lines of a configuration that can run; a cluster's instances have lines of their own."""
    cfg = checked.config
    assert cfg is not None, "only a configuration without faults has a summary"
    if cfg.role in WITHOUT_RANKS:
        ranks = [
            ("ranks", f"{one.value} on this host = {one.formula.rpartition('= ')[2]}")
            for one in derived_of(checked)
            if one.name == "cluster.ranks"
        ]
        lines = _lines([*_identity(cfg), *_service(cfg), *ranks])
    else:
        lines = _lines([*_identity(cfg), *_platform(cfg), *_own_address(cfg), *_instance(checked)])
    if cfg.role == CLUSTER:
        for role in INSTANCES:
            lines += ["", *_side(cfg, role, checked.roles[role])]
    return "\n".join(lines)


def _lines(rows: Sequence[Row]) -> list[str]:
    width = max(len(name) for name, _ in rows) + 2
    return [f"  {name:<{width}}{value}" for name, value in rows]


def _identity(cfg: InferenceConfig) -> Iterator[Row]:
    if cfg.role is not None:
        yield "role", cfg.role
    yield "model", f"{cfg.model.name} ({class_name(cfg.model._target_)}, {cfg.model.dtype.value})"
    if cfg.model.path is not None:
        yield "path", show(cfg.model.path)
    else:
        yield "path", "none: the shape alone" if is_shape_only(cfg) else "none: random weights"


def _service(cfg: InferenceConfig) -> Iterator[Row]:
    """Of a role that has no ranks itself."""
    yield "request length", _length(cfg)
    yield "address", _address(cfg.router.host, cfg.router.port)
    if cfg.role == CLUSTER:
        return  # its instances have lines of their own
    for role in INSTANCES:
        urls = getattr(cfg.router, f"{role}_urls")
        yield role, ", ".join(urls) or "those that join"


def _side(cfg: InferenceConfig, role: str, side: Checked) -> Iterator[str]:
    """The instances of one role of a cluster."""
    count: int = getattr(cfg.cluster, role)
    own: str = getattr(cfg.cluster, f"{role}_overrides")
    words = f"+role={role} with the words of this command"
    yield f"  {count} {role}: {words} and {own}" if own else f"  {count} {role}: {words}"
    assert side.config is not None, "a cluster without faults has none in its roles"
    for line in _lines([*_platform(side.config), *_own_address(side.config), *_instance(side)]):
        yield f"  {line}"


def _platform(cfg: InferenceConfig) -> Iterator[Row]:
    yield "platform", class_name(cfg.platform._target_)
    if cfg.platform.device_memory:
        yield "device memory", f"{mib(cfg.platform.device_memory)} to plan with, for each rank"


def _own_address(cfg: InferenceConfig) -> Iterator[Row]:
    """Where clients, or the router, find an instance."""
    if cfg.role is not None:
        host = cfg.disagg.http_host or "127.0.0.1"
        yield "address", _address(host, cfg.disagg.http_port)


def _address(host: str, port: int) -> str:
    return f"{host}, port {port or 'chosen at the start'}"


def _instance(checked: Checked) -> Iterator[Row]:
    cfg = checked.config
    assert cfg is not None, "only a configuration without faults has a summary"
    found = derived_values(cfg, checked.files.arch, memory=checked.memory)
    derived = {one.name: one for one in found}
    chunked = "chunked prefill" if cfg.scheduler.enable_chunked_prefill else "whole prompts"
    yield "request length", _length(cfg)
    per_rank = derived["scheduler.batch_size_per_dp_rank"].value
    yield "batch", f"{cfg.scheduler.batch_size} requests, batch_size_per_dp_rank={per_rank}"
    yield "step", f"{cfg.scheduler.max_prefill_tokens} tokens, {chunked}"
    yield from _ranks(cfg, derived)
    yield from _model(cfg, derived)


def _length(cfg: InferenceConfig) -> str:
    limit = cfg.engine.max_model_len
    return f"at most {limit} tokens" if limit else f"the context of the model, {UNKNOWN}"


def _ranks(cfg: InferenceConfig, derived: Mapping[str, Derived]) -> Iterator[Row]:
    parallel = cfg.parallel
    if parallel.world_size == 1:
        yield "ranks", "1"
        return
    sizes = ("attn_dp_size", "embed_dp_size", "moe_ep_size")
    text = ", ".join(f"{size}={derived[f'parallel.{size}'].value}" for size in sizes)
    yield "ranks", f"{parallel.world_size}: {text}"
    if len(parallel.node_ips) > 1:
        nodes = contiguous(parallel.world_size, parallel.ranks_per_node)
        for ip, ranks in zip(parallel.node_ips, nodes, strict=True):
            yield f"node {ip}", ranks_text(ranks)
    for name, one in derived.items():
        if name.startswith("groups.") and one.text != ALONE:
            yield name.removeprefix("groups."), one.text


def _model(cfg: InferenceConfig, derived: Mapping[str, Derived]) -> Iterator[Row]:
    if "rank.weight_bytes" not in derived:
        yield "weights", UNKNOWN
        yield "KV cache", UNKNOWN
        return
    is_alone = cfg.parallel.world_size == 1
    of_rank, in_all = ("", "") if is_alone else (" per rank", " in all")
    if not is_alone:
        heads = [derived[name].text for name in ("rank.heads", "rank.kv_heads") if name in derived]
        if heads:
            yield "heads", ", ".join(heads)
    if "rank.experts" in derived:
        yield "experts", derived["rank.experts"].text
    total = derived["model.parameters"].value
    weights = derived_text(derived["rank.weight_bytes"])
    yield "weights", f"{weights}{of_rank} ({total:,} parameters{in_all})"
    yield "KV cache", f"{derived['rank.kv_bytes_per_token'].value:,} bytes per token{of_rank}"
    if "kv_cache.blocks" in derived:
        yield "KV blocks", _blocks(cfg, derived)
        at_once = derived_text(derived["kv_cache.concurrent_requests"])
        yield "at once", f"{at_once} requests of {cfg.engine.max_model_len:,} tokens"


def _blocks(cfg: InferenceConfig, derived: Mapping[str, Derived]) -> str:
    found = {name.removeprefix("kv_cache."): one for name, one in derived.items()}
    text = f"{found['blocks_per_request'].value} of {cfg.kv_cache.block_size} tokens per request, "
    size = derived_text(found["pool_bytes"])
    if cfg.kv_cache.num_blocks:
        return f"{text}{found['blocks'].value} in the pool: {size}"
    wanted, blocks = found["blocks_wanted"].value, found["blocks"].value
    if blocks < wanted:
        return f"{text}{blocks} fit of {wanted} wanted: {size}"
    requests = f"{cfg.batch_size_per_dp_rank} requests + null block"
    if cfg.kv_cache.enable_prefix_cache:
        requests = f"{cfg.batch_size_per_dp_rank} requests * 2 (prefixes) + null"
    return f"{text}{wanted} for {requests}: {size}"
