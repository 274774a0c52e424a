"""A rank of an online instance: built like any other, then one loop."""

import faulthandler
import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from inferkit.config.schema import InferenceConfig
from inferkit.core.place import RankPlace
from inferkit.core.protocols import Channel
from inferkit.kv_transfer.identity import Peer
from inferkit.online.instance import ParentAddress
from inferkit.online.loop import OnlineLoop
from inferkit.online.output_sender import NoOutbox, Outbox, OutputSender
from inferkit.online.request_feed import RequestFeed
from inferkit.online.request_table import RequestTable
from inferkit.online.worker_link import WorkerLink
from inferkit.parallel.comm_manager import leave_ranks
from inferkit.runtime.assembly import Assembly, assemble
from inferkit.runtime.hand_off import HandOffSide
from inferkit.runtime.logs import log_to_file
from inferkit.runtime.meeting import meeting
from inferkit.runtime.place import common_facts
from inferkit.runtime.rank_errors import error_event
from inferkit.runtime.secret import read_secret

logger = logging.getLogger(__name__)

STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of its threads to its stderr, whatever it hangs in."""


def online_worker(
    place: RankPlace,
    config: InferenceConfig,
    run_dir: Path,
    log_level: str,
    parent: ParentAddress | None,
    *,
    channel: Channel,
) -> None:
    """Entrypoint of a rank's process; `channel` is a pipe to the process that has started it.

    Args:
        parent: where requests come from; None on a node that does not lead its instance.
    """
    log_to_file(run_dir / f"rank{place.rank}.log", rank=place.rank, level=log_level)
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    channel.send({"event": "process", "rank": place.rank, "pid": os.getpid()})

    def run(place: RankPlace) -> None:
        run_rank(place, config, run_dir, parent, channel=channel)

    if place.local_world_size == place.world_size:
        run(place)
        return
    with meeting(
        place,
        on_stuck=lambda error: channel.send(error_event(error)),
        facts=common_facts(config),
    ) as met:
        run(met.place)
        met.has_finished = True


def run_rank(
    place: RankPlace,
    config: InferenceConfig,
    run_dir: Path,
    parent: ParentAddress | None,
    *,
    channel: Channel,
) -> None:
    """Build this rank's parts, then serve."""

    def stage(text: str) -> None:
        if place.local_rank == 0:
            channel.send({"event": "stage", "text": text})

    side = HandOffSide(host=place.local_ip)
    if parent is not None:
        peer = Peer(parent.instance.instance_id, parent.instance.epoch)
        side = replace(side, peer=peer, bootstrap_url=parent.bootstrap_url)
    parts = assemble(
        config, clock=time.monotonic, place=place, side=side, run_dir=run_dir, stage=stage
    )
    leading: ParentAddress = parts.comm.world.all_gather_objects(parent)[0]
    facts = _facts(parts) if place.rank == 0 else {}
    channel.send({"event": "ready", "rank": place.rank, "facts": facts})
    try:
        serve(parts, leading, read_secret(config.disagg))
    finally:
        parts.profiler.close()
        if parts.hand_off is not None:
            parts.hand_off.close()
    leave_ranks()


def serve(parts: Assembly, parent: ParentAddress, secret: bytes = b"") -> None:
    """Loop until the parent says stop; `secret` is shared with it."""
    comm, instance = parts.comm, parent.instance
    group = comm.group("tp_cpu_group") if comm.layout.attn_tp_size > 1 else None
    dp_group = comm.group("dp_group") if comm.joins_dp_ranks else None
    requests = RequestTable(vocab_size=parts.arch.vocab_size)
    with zmq.Context[zmq.Socket[bytes]]() as context:
        outbox: Outbox = NoOutbox()
        link = sender = None
        if comm.is_dp_leader:
            link = WorkerLink(context=context, parent=parent, dp_rank=comm.dp_rank, secret=secret)
            link.connect()
            sender = outbox = OutputSender(
                instance=instance, dp_rank=comm.dp_rank, link=link, clock=time.monotonic
            )
            sender.announce()
        feed = RequestFeed(
            instance=instance,
            link=link,
            group=group,
            clock=time.monotonic,
            on_refused=sender.refuse if sender else _nobody_asks,
        )
        loop = OnlineLoop(
            feed=feed,
            requests=requests,
            scheduler=parts.scheduler,
            engine=parts.engine,
            outbox=outbox,
            dp_group=dp_group,
        )
        logger.info("serving dp_rank=%d", comm.dp_rank)
        try:
            loop.run()
        finally:
            if link is not None:
                link.close()
    logger.info("stopped after %d steps", parts.scheduler.num_steps)


def _nobody_asks(key: tuple[int, int], detail: str) -> None:
    """Only a leader hears of malformed requests."""


def _facts(parts: Assembly) -> dict[str, Any]:
    """What a reader of the run directory must know beyond the configuration."""
    return {
        "weights_bytes": parts.engine.worker.num_weight_bytes,
        "kv_blocks": dict(parts.kv_cache.num_blocks),
        "platform": parts.platform.name,
    }
