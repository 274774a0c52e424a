"""THE wiring page: from a configuration to the running parts of one rank, in order."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inferkit.config.build import build, get_target, guarded
from inferkit.config.model_files import arch_of, check_architecture, check_user_arch
from inferkit.config.model_rules import require_model
from inferkit.config.schema import DisaggMode, InferenceConfig
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError
from inferkit.core.parallel_layout import ParallelLayout
from inferkit.core.place import RankPlace
from inferkit.core.protocols import Clock
from inferkit.core.secrets import revealed
from inferkit.engine.execution_engine import ExecutionEngine
from inferkit.engine.model_worker import ModelWorker
from inferkit.engine.profiler import NullProfiler, Profiler
from inferkit.engine.sampler import Sampler
from inferkit.kv_cache.host_store import left_for_pools
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.loader.base_loader import BaseModelLoader
from inferkit.loader.byte_tokenizer import make_byte_tokenizer
from inferkit.loader.dummy_loader import DummyModelLoader
from inferkit.loader.source import ModelSource, resolve_source
from inferkit.parallel.comm_manager import CommManager, join_ranks
from inferkit.platforms.base import Platform
from inferkit.runtime.hand_off import HandOff, HandOffSide
from inferkit.runtime.launched import find_launched
from inferkit.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """The parts of one rank, ready for the first request."""

    platform: Platform
    source: ModelSource | None
    arch: Any
    tokenizer: Any
    engine: ExecutionEngine
    kv_cache: KVCacheManager
    scheduler: Scheduler
    profiler: Profiler | NullProfiler
    comm: CommManager
    hand_off: HandOff | None = None
    """Of a rank that computes a half of its requests."""

    def close(self) -> None:
        """End threads and sockets of this rank; what was running on it is given up."""
        if self.hand_off is not None:
            self.hand_off.close()
        self.comm.close()


def assemble(
    config: InferenceConfig,
    *,
    clock: Clock,
    place: RankPlace | None = None,
    side: HandOffSide | None = None,
    run_dir: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stage: Callable[[str], None] = lambda text: None,
) -> Assembly:
    """Build platform, model, engine, KV cache and scheduler, each through its `_target_`.

    Args:
        config: automatic values are resolved already.
        place: of this process among the ranks (None = by the variables of torchrun or srun, else
            it is the only one). Every rank assembles at the same time: they meet here.
        side: of the instance, where `disagg.mode` is prefill or decode.
        run_dir: where profiler traces go; None = no traces.
        progress: called with (bytes done, bytes in all) while weights load.
        stage: called with a word or two at each stage of the start.
    """
    targets = config.allowed_targets
    if place is None:
        launched = find_launched()
        place = RankPlace() if launched is None else launched.place()
    check_world_size(config, place)
    platform: Platform = build(config.platform, allowed_targets=targets, key="platform")
    platform.start(place)
    join_ranks(place, backend=platform.comm_backend)
    comm = CommManager(
        ParallelLayout.of(config.parallel),
        rank=place.rank,
        backend=platform.comm_backend,
        local_world_size=place.local_world_size,
    )

    stage("resolving model")
    source = None
    if config.model.path is not None:
        source = resolve_source(
            config.model.path, with_weights=config.model.with_ckpt, progress=progress
        )
    arch = read_arch(config, source)
    tokenizer = source.load_tokenizer() if source else make_byte_tokenizer(arch.vocab_size)
    eos_token_ids = source.eos_token_ids(tokenizer) if source else frozenset(arch.eos_token_ids)

    if config.model.with_ckpt:
        loader: BaseModelLoader = build(
            config.model.loader, allowed_targets=targets, key="model.loader"
        )
    else:
        loader = DummyModelLoader(seed=config.data.seed or 0)
    if config.model.enable_profiler and run_dir is not None and comm.rank == 0:
        profiler: Profiler | NullProfiler = Profiler(
            output_dir=run_dir / "prof", activities=platform.profiler_activities()
        )
    else:
        profiler = NullProfiler()
        if config.model.enable_profiler and comm.rank == 0:
            logger.warning("model.enable_profiler=true has no effect without a run directory")
    model_class = get_target(config.model._target_, allowed_targets=targets, key="model._target_")
    worker = ModelWorker(
        platform=platform,
        make_model=partial(
            guarded(model_class, name=config.model._target_, key="model._target_"),
            arch,
            **revealed(config.model.custom_params),
        ),
        dtype=getattr(torch, config.model.dtype.value),
        block_size=config.kv_cache.block_size,
        loader=loader,
        source=source,
        exe_mode=build(config.exe_mode, allowed_targets=targets, key="exe_mode"),
        profiler=profiler,
        progress=progress,
        comm=comm,
        force_eplb=config.model.force_eplb,
    )
    engine: ExecutionEngine = build(
        config.engine,
        allowed_targets=targets,
        key="engine",
        worker=worker,
        sampler=Sampler(eos_token_ids),
    )
    stage("loading weights")
    engine.init()

    stage("allocating KV cache")
    max_num_requests = config.batch_size_per_dp_rank
    free_bytes = comm.world.min(platform.free_memory())  # equal pools on all ranks
    if config.disagg.mode is DisaggMode.decode and platform.device.type == "cpu":
        free_bytes = left_for_pools(free_bytes, config.kv_cache.host_bytes)
    kv_cache: KVCacheManager = build(
        config.kv_cache,
        allowed_targets=targets,
        key="kv_cache",
        specs=engine.cache_specs,
        max_model_len=config.engine.max_model_len,
        max_num_requests=max_num_requests,
        free_bytes=free_bytes,
    )
    hand_off = None
    if config.disagg.mode is not DisaggMode.none:
        assert side is not None, "a role is started by its runner, which knows the instance"
        hand_off = HandOff(config, side, comm=comm, place=place, source=source, clock=clock)
    engine.init_cache(kv_cache, hand_off.allocate if hand_off is not None else None)
    role_parts: dict[str, Any] = {}
    if hand_off is not None:
        hand_off.attach(engine, kv_cache)
        role_parts = hand_off.scheduler_parts(engine, kv_cache)
    scheduler: Scheduler = build(
        config.scheduler,
        allowed_targets=targets,
        key="scheduler",
        kv_cache=kv_cache,
        max_model_len=config.engine.max_model_len,
        eos_token_ids=eos_token_ids,
        clock=clock,
        attn_dp_size=config.parallel.attn_dp_size,
        **role_parts,
    )
    stage("warming up")
    engine.warm_up(
        max_tokens=config.scheduler.max_prefill_tokens, max_num_requests=max_num_requests
    )
    if hand_off is not None:
        hand_off.start()
    return Assembly(
        platform=platform,
        source=source,
        arch=arch,
        tokenizer=tokenizer,
        engine=engine,
        kv_cache=kv_cache,
        scheduler=scheduler,
        profiler=profiler,
        comm=comm,
        hand_off=hand_off,
    )


def check_world_size(config: InferenceConfig, place: RankPlace) -> None:
    """The configuration is for as many ranks as there are.

    Raises:
        ConfigError: it is not.
    """
    world_size = config.parallel.world_size
    if world_size != place.world_size:
        raise ConfigError(
            f"parallel.world_size={world_size} is configured, but this process is rank "
            f"{place.rank} of {place.world_size}; `python -m inferkit` starts the ranks itself, "
            f"torchrun needs --nproc-per-node {world_size} on one node"
        )


def read_arch(config: InferenceConfig, source: ModelSource | None) -> Any:
    """The model's architecture, from its files or from `model.arch`.

    Raises:
        ConfigError: the model class does not cover it, `model.arch` contradicts the files, or the
            configuration asks for what this model cannot do.
    """
    target = config.model._target_
    hf_config = source.config if source else config.model.arch
    check_architecture(target, hf_config, ConfigSpace().model_targets)
    arch = arch_of(target, hf_config)
    if source and config.model.arch:
        check_user_arch(target, config.model.arch, hf_config, origin=source.path)
    require_model(config, arch)
    return arch
