"""A rank of an offline run: generates; rank 0 writes the run directory."""

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from inferkit.config.provenance import environment, record
from inferkit.config.schema import InferenceConfig
from inferkit.config.secrets import secret_variables
from inferkit.core.place import RankPlace
from inferkit.core.protocols import Channel
from inferkit.offline.generations import open_part, part_path, write_generations
from inferkit.offline.inference import OfflineInference
from inferkit.offline.metrics import collect_metrics
from inferkit.offline.prompts import load_prompts
from inferkit.offline.result import GenerationResult
from inferkit.parallel.comm_manager import leave_ranks
from inferkit.runtime.logs import log_to_file
from inferkit.runtime.meeting import meeting
from inferkit.runtime.place import common_facts
from inferkit.runtime.rank_errors import error_event
from inferkit.scheduler.step_record import StepRecord

logger = logging.getLogger(__name__)


def offline_worker(
    place: RankPlace, config: InferenceConfig, run_dir: Path, log_level: str, *, channel: Channel
) -> None:
    """Entrypoint of a rank's process; `channel` is a pipe to the parent."""
    log_to_file(run_dir / f"rank{place.rank}.log", rank=place.rank, level=log_level)
    if place.local_world_size == place.world_size:
        run_offline(config, run_dir, place=place, channel=channel)
        return
    if place.local_rank == 0:
        where = f"{place.master_addr}:{place.master_port}"
        text = f"waiting for {place.world_size} ranks at {where}"
        channel.send({"event": "stage", "text": text})
    with meeting(
        place,
        on_stuck=lambda error: channel.send(error_event(error)),
        facts=common_facts(config),
    ) as met:
        run_offline(config, run_dir, place=met.place, channel=channel)
        met.has_finished = True


def run_offline(
    config: InferenceConfig, run_dir: Path, *, place: RankPlace, channel: Channel
) -> None:
    """Generate for the configured prompts; rank 0 writes generations, metrics and picture.

    The first rank of every node sends progress, rank 0 the result.
    """
    start_s = time.monotonic()
    if place.local_rank != 0:
        channel = _Silence()
    prompts = load_prompts(config.data)
    llm = OfflineInference(
        config,
        place=place,
        run_dir=run_dir,
        progress=_throttled(channel, "load"),
        stage=lambda text: channel.send({"event": "stage", "text": text}),
    )
    load_time_s = time.monotonic() - start_s
    if place.rank == 0:
        record(run_dir, **_facts(llm))
    share = range(llm.parts.comm.dp_rank, len(prompts), config.parallel.attn_dp_size)
    channel.send({"event": "stage", "text": "generating", "num_prompts": len(share)})

    def on_step(step: StepRecord, num_finished: int) -> None:
        channel.send({"event": "step", "record": step, "num_finished": num_finished})

    part = part_path(run_dir, place.rank)
    keeping = open_part(part) if llm.parts.comm.is_dp_leader else nullcontext(_forget)
    try:
        with keeping as keep:
            results = llm.generate(prompts, on_step=on_step, on_result=keep)
    finally:
        llm.parts.profiler.close()
    expert_load = llm.parts.engine.expert_load()  # every rank must ask
    if place.rank == 0:
        write_generations(run_dir, results)
    llm.parts.comm.world.max(place.rank)  # the parts are needed until all of them are one file
    part.unlink(missing_ok=True)
    if place.rank == 0:
        _write(
            llm,
            results,
            run_dir,
            load_time_s=load_time_s,
            expert_load=expert_load,
            channel=channel,
        )
    leave_ranks()


def _write(
    llm: OfflineInference,
    results: list[GenerationResult],
    run_dir: Path,
    *,
    load_time_s: float,
    expert_load: dict[int, list[int]] | None,
    channel: Channel,
) -> None:
    metrics = collect_metrics(
        llm.step_records,
        llm.requests,
        peak_memory_bytes=llm.parts.platform.peak_memory(),
        load_time_s=load_time_s,
        expert_load=expert_load,
    )
    (run_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    picture = _draw(llm.step_records, run_dir / "steps.png")
    channel.send(
        {"event": "result", "metrics": metrics, "results": results[:4], "picture": picture}
    )


def _forget(result: GenerationResult) -> None:
    """Another rank has the same result."""


class _Silence:
    """The channel of a rank that shows nothing."""

    def send(self, event: dict[str, Any]) -> None:
        """Another rank of this node shows the same."""


def _draw(records: list[StepRecord], path: Path) -> str | None:
    """The step-time picture, where the extra `plots` is installed and there was a step."""
    try:
        from inferkit.offline.plots import plot_steps
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        logger.info("no step-time picture: install the extra inferkit[plots]")
        return None
    return str(path) if plot_steps(records, path) else None


def _facts(llm: OfflineInference) -> dict[str, Any]:
    """What a reader of the run directory must know beyond the configuration."""
    parts, model = llm.parts, llm.config.model
    return {
        "model": parts.source.identity(with_weights=model.with_ckpt)
        if parts.source
        else {"arch": model.arch},
        "weights_bytes": parts.engine.worker.num_weight_bytes,
        "kv_blocks": dict(parts.kv_cache.num_blocks),
        "platform": parts.platform.name,
        "rank_environment": environment(os.environ, secrets=secret_variables(llm.config)),
    }


def _throttled(channel: Channel, event: str) -> Callable[[int, int], None]:
    """A progress callback that sends at most one event per percent."""
    last = -1

    def progress(done: int, total: int) -> None:
        nonlocal last
        percent = 100 * done // max(1, total)
        if percent != last:
            last = percent
            channel.send({"event": event, "done": done, "total": total})

    return progress
