"""Managers under load and faults, each instance on threads of its own.

Pools are small, so blocks are used again at once: a write that lands too late is seen as content
that changes while a request runs.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from inferkit.kv_transfer.actions import Code
from inferkit.kv_transfer.identity import TransferKey
from inferkit.kv_transfer.timers import TransferTimers
from tests.kv_transfer.manager_ranks import (
    BLOCK_SIZE,
    DEADLINE_S,
    FULL,
    MIXED,
    DecodeInstance,
    Instance,
    Job,
    PrefillInstance,
    Site,
    make_job,
)

TIMERS = TransferTimers(
    lease_s=3.0, transfer_timeout_s=20.0, handshake_timeout_s=20.0, fence_timeout_s=0.5
)
POOL = 10
NUM_SLOTS = 3


class Runner:
    """An instance that ticks by itself; `do` runs a call between two ticks."""

    def __init__(self, instance: Instance, seed: int) -> None:
        self.instance = instance
        instance.free[FULL] = instance.free[FULL][:POOL]
        self.rng = Random(seed)
        self.error: BaseException | None = None
        self._calls: list[Callable[[], None]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def do(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._is_over.wait(0.002)
                if self.rng.random() < 0.02:
                    time.sleep(0.05)  # a long step
                while self._calls:
                    self._calls.pop(0)()
                self.instance.tick()
        except BaseException as error:
            self.error = error


class SoakPrefill(PrefillInstance):
    """Takes blocks only while there are some."""

    def schedule(self) -> None:
        waiting = [key for key in self.ready if key not in self.ends]
        room = len(self.free[FULL])
        self.ready = []
        for key in waiting:
            num_blocks = -(-self.jobs[key].kv_len // BLOCK_SIZE)
            if num_blocks <= room:
                room -= num_blocks
                self.ready.append(key)
        later = [key for key in waiting if key not in self.ready]
        super().schedule()
        self.ready += later


class SoakDecode(DecodeInstance):
    """Runs each request for some ticks and looks at its content again at the end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.steps: Counter[TransferKey] = Counter()
        super().__init__(*args, **kwargs)

    def schedule(self) -> None:
        for key in [key for key in self.landed if key not in self.ends]:
            self.steps[key] += 1
            if self.steps[key] >= 5:
                self.check_content(self.jobs[key])
                self.call("complete", key)
        for key in self.managers[0].admissible():
            num_tokens = self.jobs[key].kv_len + 1
            has_room = len(self.free[FULL]) >= -(-num_tokens // BLOCK_SIZE)
            if has_room and self.managers[0].num_free_slots:
                self.call("admit", key, self.take_blocks(key, num_tokens))


@dataclass
class Request:
    job: Job
    prefill: Instance
    decode: Instance
    legs: list[Instance]
    """Those that its router reaches."""
    is_doomed: bool
    """Its client leaves, a leg never comes or has failed."""


class Soak:
    """Two prefill and two decode instances of random sizes."""

    def __init__(self, site: Site, engine: str, seed: int) -> None:
        site.use(engine, timers=TIMERS, num_cells=NUM_SLOTS, model=MIXED)
        self.site = site
        self.rng = Random(seed)
        self.runners: dict[Instance, Runner] = {}
        self.gone: list[Instance] = []
        self.requests: list[Request] = []
        self.left: set[TransferKey] = set()
        """Requests whose client has left."""
        self.prefills = [self.start(SoakPrefill, f"p{idx}", 10 + idx) for idx in range(2)]
        self.decodes = [self.start(SoakDecode, f"d{idx}", 20 + idx) for idx in range(2)]

    def start(self, kind: type[Instance], name: str, epoch: int, tp: int = 0) -> Any:
        size = tp or self.rng.choice((1, 2))
        instance = kind(name, epoch, self.site.make_engine, tp=size, **self.site.defaults)
        self.site.stack.callback(instance.close)
        if isinstance(instance, SoakDecode):
            for prefill in self.prefills:
                instance.learn(prefill)
        self.runners[instance] = Runner(instance, self.rng.getrandbits(30))
        return instance

    def send(self, faults: float) -> None:
        """One request, perhaps with a fault."""
        rng = self.rng
        prefill, decode = rng.choice(self.prefills), rng.choice(self.decodes)
        job = make_job(prefill, decode, rng.randint(1, 20))
        if rng.random() < 0.1:
            prefill.finishes.add(job.key)
        chunks = sorted({rng.randint(1, job.kv_len) for _ in range(2)} - {job.kv_len})
        legs = [decode, prefill] if rng.random() >= faults / 4 else [rng.choice([decode, prefill])]
        if decode in legs:
            self.runners[decode].do(lambda: decode.generate(job))
        if prefill in legs:
            self.runners[prefill].do(lambda: prefill.generate(job, chunks))
        leaves = len(legs) < 2 or rng.random() < faults
        self.requests.append(Request(job, prefill, decode, legs, leaves))
        if leaves:
            self.left.add(job.key)
            time.sleep(rng.random() * 0.03)
            self.cancel(self.requests[-1])
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.02)

    def hiccup(self) -> None:
        """A decode rank thinks for a moment that a prefill instance is gone."""
        peer = self.rng.choice(self.prefills).me
        manager = self.rng.choice(self.rng.choice(self.decodes).managers)
        manager.lose(peer)
        time.sleep(self.rng.random() * 0.02)
        manager.find(peer)

    def restart(self) -> None:
        """An instance dies without a word, and another life takes its place."""
        group = self.rng.choice((self.prefills, self.decodes))
        idx = self.rng.randrange(2)
        old = group[idx]
        self.runners.pop(old).stop()
        old.close()
        self.gone.append(old)
        group[idx] = self.start(type(old), old.me.instance_id, old.me.epoch + 100, old.tp)
        if group is self.prefills:
            for decode in self.decodes:
                decode.learn(group[idx])
        for request in self.requests:  # their router sees one leg break and closes the other
            if old in request.legs:
                self.cancel(request)

    def cancel(self, request: Request) -> None:
        for leg in request.legs:
            if leg not in self.gone:
                self.runners[leg].do(lambda leg=leg: leg.call("cancel", request.job.key))  # type: ignore[misc]

    def finish(self) -> None:
        """Everything is answered and given back."""
        deadline = time.monotonic() + DEADLINE_S

        def is_over() -> bool:
            return all(
                leg in self.gone or request.job.key in leg.ends
                for request in self.requests
                for leg in request.legs
            ) and all(instance.is_quiet() for instance in self.runners)

        while not is_over():
            for runner in self.runners.values():
                if runner.error is not None:
                    raise runner.error
            self.close_legs()
            stats = [instance.stats() for instance in self.runners]
            assert time.monotonic() < deadline, stats
            time.sleep(0.01)
        for instance, runner in self.runners.items():
            runner.stop()
            assert len(instance.free[FULL]) == len(set(instance.free[FULL])) == POOL
        for decode in self.decodes:
            assert all(m.num_free_slots == NUM_SLOTS for m in decode.managers)

    def close_legs(self) -> None:
        """A router whose one leg fails closes the other."""
        for request in self.requests:
            ends = [leg.ends.get(request.job.key) for leg in request.legs]
            if not request.is_doomed and any(end and end.code is not Code.OK for end in ends):
                request.is_doomed = True
                self.cancel(request)

    def num_landed(self) -> int:
        return sum(r.job.key in r.decode.landed for r in self.requests)  # type: ignore[attr-defined]


def run_with_clients_that_leave(site: Site, engine: str, seed: int, num_requests: int) -> None:
    soak = Soak(site, engine, seed)
    for _ in range(num_requests):
        soak.send(faults=0.3)
    soak.finish()
    for request in soak.requests:
        for leg in request.legs:
            end = leg.ends[request.job.key]
            assert end.code is Code.OK or request.job.key in soak.left, end
    assert soak.num_landed() > num_requests // 3


def run_with_instances_that_die(site: Site, engine: str, seed: int, num_requests: int) -> None:
    soak = Soak(site, engine, seed)
    for idx in range(num_requests):
        soak.send(faults=0.1)
        if soak.rng.random() < 0.05:
            soak.hiccup()
        if idx % 25 == 20:
            soak.restart()
    soak.finish()
    assert soak.num_landed() > num_requests // 6


@pytest.mark.parametrize("engine", ["shared_memory", "tcp"])
def test_clients_leave(site: Site, engine: str) -> None:
    run_with_clients_that_leave(site, engine, seed=7, num_requests=60)


@pytest.mark.parametrize("engine", ["shared_memory", "tcp"])
def test_instances_die(site: Site, engine: str) -> None:
    run_with_instances_that_die(site, engine, seed=7, num_requests=40)


@pytest.mark.fuzz
@pytest.mark.parametrize("engine", ["in_process", "shared_memory", "tcp"])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("run", [run_with_clients_that_leave, run_with_instances_that_die])
def test_at_length(site: Site, engine: str, seed: int, run: Callable[..., None]) -> None:
    run(site, engine, seed, num_requests=200)
