"""Prefill and decode instances for tests: each a pool of ranks with the real parts of a worker,
and between them real sockets, transfer engines and bootstrap servers. Only HTTP, the dispatcher
and the router are left out: requests come as a list.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from inferkit.core.messages import Generate, Stop, ToWorker
from inferkit.core.place import RankPlace
from inferkit.core.request import Pair, Request
from inferkit.core.sampling_params import SamplingParams
from inferkit.kv_transfer.identity import Peer

LIMIT_MS = 60_000
HEADER: dict[str, Any] = {"instance_id": "test", "epoch": 1, "peer_epoch": 1}
Result = dict[int, dict[str, Any]]
"""Room -> `tokens`, `finish_reason`, `finish_detail`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request of a test."""

    room: int
    token_ids: list[int]
    max_tokens: int = 8
    prefill: int = 0
    """Which prefill instance."""
    decode: int = 0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    """Of `SamplingParams`, beside those of greedy decoding."""

    @property
    def sampling(self) -> SamplingParams:
        options = {"temperature": 0.0, "max_tokens": self.max_tokens} | self.options
        return SamplingParams(**options)


class ScriptedFeed:
    """In place of `RequestFeed`: all requests at once, and Stop when they are over."""

    num_dropped = 0

    def __init__(self, jobs: Sequence[Generate], is_quiet: Callable[[], bool]) -> None:
        self.jobs = list(jobs)
        self.num_open = len(self.jobs)
        self.is_quiet = is_quiet
        """Whether nothing is held for any request."""
        self._pause = threading.Event()

    def receive(self, wait_ms: int) -> list[ToWorker]:
        jobs, self.jobs = self.jobs, []
        if jobs:
            return list(jobs)
        if not self.num_open and self.is_quiet():
            return [Stop(**HEADER)]
        self._pause.wait(min(wait_ms, 2) / 1000)
        return []

    def forget(self, key: tuple[int, int]) -> None:
        self.num_open -= 1


class Results:
    """In place of an outbox."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}

    def send(self, new_tokens: Any, finished: Any, state: Any) -> None:
        for (room, _), request in finished.items():
            assert room not in self.requests, f"room {room} ends twice"
            self.requests[room] = request


def run_rank(
    place: RankPlace,
    overrides: list[str],
    peer: Peer,
    bootstrap_url: str,
    jobs: list[Generate],
) -> dict[str, Any]:
    """A rank of an instance, from its assembly until all its requests are over."""
    import time

    from inferkit import load_config
    from inferkit.online.loop import OnlineLoop
    from inferkit.online.request_table import RequestTable
    from inferkit.runtime.assembly import assemble
    from inferkit.runtime.hand_off import HandOffSide

    config = load_config(overrides)
    side = HandOffSide(peer=peer, bootstrap_url=bootstrap_url)
    parts = assemble(config, clock=time.monotonic, place=place, side=side)
    assert parts.hand_off is not None
    comm, scheduler = parts.comm, parts.scheduler
    dp_size = comm.layout.attn_dp_size
    own = [job for job in jobs if job.room % dp_size == comm.dp_rank]
    results = Results()
    registration = parts.hand_off.registration

    def is_quiet() -> bool:
        """A rank that has nothing to do must still be known to decode."""
        is_known = registration is None or registration.is_registered
        return is_known and not scheduler.has_handoffs

    loop = OnlineLoop(
        feed=ScriptedFeed(own, is_quiet),  # type: ignore[arg-type]
        requests=RequestTable(vocab_size=parts.arch.vocab_size),
        scheduler=scheduler,
        engine=parts.engine,
        outbox=results,
        dp_group=comm.group("dp_group") if comm.joins_dp_ranks else None,
    )
    try:
        loop.run()
        assert parts.kv_cache.num_used_blocks == 0
        parts.kv_cache.check_integrity()
        stats = parts.hand_off.manager.stats()
    finally:
        parts.close()
    return {
        "results": {
            room: {
                "tokens": request.output_token_ids,
                "finish_reason": str(request.finish_reason),
                "finish_detail": request.finish_detail,
                "logprobs": request.output_logprobs,
                "num_retractions": request.num_preemptions,
            }
            for room, request in results.requests.items()
        },
        "stats": stats,
        "num_steps": scheduler.num_steps,
        "is_leader": comm.is_dp_leader,
    }


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Instances of both roles; each entry is (ranks, overrides of that instance)."""

    prefills: Sequence[tuple[int, Sequence[str]]]
    decodes: Sequence[tuple[int, Sequence[str]]]
    common: Sequence[str] = ()


def serve_jobs(
    pools: Callable[[str, int], Any], deployment: Deployment, jobs: Sequence[Job]
) -> tuple[Result, dict[str, list[dict[str, Any]]]]:
    """Run all jobs through a deployment.

    Returns room -> what decode answered, and what every rank of every instance returned.
    """
    import random

    from tests.pd.bootstrap import BootstrapThread

    rng = random.Random()
    peers = {
        name: Peer(name, rng.getrandbits(63))
        for side, instances in (("prefill", deployment.prefills), ("decode", deployment.decodes))
        for name in (f"{side}{number}" for number in range(len(instances)))
    }
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(BootstrapThread(peer)).url
            for name, peer in peers.items()
            if name.startswith("prefill")
        }
        messages = {name: list[Generate]() for name in peers}
        for number, job in enumerate(jobs):
            prefill, decode = f"prefill{job.prefill}", f"decode{job.decode}"
            pair = Pair(
                prefill_id=prefill,
                prefill_epoch=peers[prefill].epoch,
                decode_id=decode,
                decode_epoch=peers[decode].epoch,
                bootstrap_url=urls[prefill],
            )
            message = Generate(
                **HEADER,
                room=job.room,
                attempt=1000 + number,
                remaining_ms=LIMIT_MS,
                token_ids=job.token_ids,
                sampling=job.sampling,
                seed=job.seed,
                pair=pair,
            )
            messages[prefill].append(message)
            messages[decode].append(message)
        runs = []
        executor = stack.enter_context(ThreadPoolExecutor(len(peers)))
        for side, instances in (("prefill", deployment.prefills), ("decode", deployment.decodes)):
            for number, (world_size, overrides) in enumerate(instances):
                name = f"{side}{number}"
                words = [*deployment.common, f"+role={side}", *overrides]
                pool = pools(name, world_size)
                args = (words, peers[name], urls.get(name, ""), messages[name])
                runs.append((name, executor.submit(pool.run, run_rank, *args)))
        outputs = {name: run.result() for name, run in runs}
    answers: Result = {}
    for name, ranks in outputs.items():
        if name.startswith("decode"):
            for rank in ranks:
                for room, answer in rank["results"].items():
                    known = answers.setdefault(room, answer)
                    assert known["tokens"] == answer["tokens"], "ranks answer differently"
    return answers, outputs
