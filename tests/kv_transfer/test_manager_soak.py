"""Managers under load and faults, each instance on threads of its own.

Pools are small, so blocks are used again at once: a write that lands too late is seen as content
that changes while a request runs.
"""

import threading
import time
from collections.abc import Callable
from random import Random

import pytest

from inferkit.kv_transfer.actions import Code
from inferkit.kv_transfer.timers import TransferTimers
from tests.kv_transfer.manager_ranks import (
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
        self.instance.woken.set()

    def stop(self) -> None:
        self._is_over.set()
        self.instance.woken.set()
        self._thread.join(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self.instance.woken.wait(0.02)
                self.instance.woken.clear()
                if self.rng.random() < 0.02:
                    time.sleep(0.05)  # a long step
                while self._calls:
                    self._calls.pop(0)()
                self.instance.tick()
        except BaseException as error:
            self.error = error


class SoakPrefill(PrefillInstance):
    """Takes blocks only while there are some."""

    def take_blocks(self, key, num_tokens):  # type: ignore[no-untyped-def]
        return super().take_blocks(key, num_tokens)

    def schedule(self) -> None:
        waiting, self.ready = self.ready, []
        room = len(self.free[FULL])
        for key in waiting:
            need = -(-self.jobs[key].kv_len // 4)
            if key in self.ends:
                continue
            if need <= room:
                room -= need
                self.ready.append(key)
        later = [key for key in waiting if key not in self.ready and key not in self.ends]
        super().schedule()
        self.ready += later


class SoakDecode(DecodeInstance):
    """Runs each request for some ticks and looks at its content again at the end."""

    def __init__(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        self.steps: dict[object, int] = {}
        super().__init__(*args, **kwargs)

    def schedule(self) -> None:
        for key in [key for key in self.landed if key not in self.ends]:
            self.steps[key] = self.steps.get(key, 0) + 1
            if self.steps[key] >= 5:
                self.check_content(self.jobs[key])
                self.call("complete", key)
        for key in self.managers[0].admissible():
            job = self.jobs[key]
            enough = len(self.free[FULL]) >= -(-(job.kv_len + 1) // 4)
            if enough and self.managers[0].num_free_slots:
                self.call("admit", key, self.take_blocks(key, job.kv_len + 1))


def run_soak(site: Site, engine: str, seed: int, num_requests: int, faults: float) -> None:
    site.use(engine, timers=TIMERS, num_cells=3, model=MIXED)
    rng = Random(seed)
    sizes = [rng.choice((1, 2)) for _ in range(4)]
    prefills = [
        SoakPrefill(f"p{idx}", 10 + idx, site.make_engine, tp=sizes[idx], **site.defaults)
        for idx in range(2)
    ]
    decodes = [
        SoakDecode(f"d{idx}", 20 + idx, site.make_engine, tp=sizes[2 + idx], **site.defaults)
        for idx in range(2)
    ]
    for instance in (*prefills, *decodes):
        site.stack.callback(instance.close)
    for decode in decodes:
        for prefill in prefills:
            decode.learn(prefill)
    runners: dict[Instance, Runner] = {
        instance: Runner(instance, seed + idx) for idx, instance in enumerate((*prefills, *decodes))
    }
    jobs: list[tuple[PrefillInstance, DecodeInstance, Job, bool]] = []
    for _ in range(num_requests):
        prefill, decode = rng.choice(prefills), rng.choice(decodes)
        job = make_job(prefill, decode, rng.randint(1, 20))
        if rng.random() < 0.1:
            prefill.finishes.add(job.key)
        chunks = sorted(
            {rng.randint(1, job.kv_len) for _ in range(rng.randint(0, 2))} - {job.kv_len}
        )
        is_lost = rng.random() < faults / 4  # one leg never comes
        if not is_lost or rng.random() < 0.5:
            runners[decode].do(lambda d=decode, j=job: d.generate(j))  # type: ignore[misc]
        else:
            decode.ends[job.key] = None  # type: ignore[assignment]
        if not is_lost or job.key in decode.ends:
            runners[prefill].do(lambda p=prefill, j=job, c=chunks: p.generate(j, c))  # type: ignore[misc]
        else:
            prefill.ends[job.key] = None  # type: ignore[assignment]
        has_fault = is_lost or rng.random() < faults
        jobs.append((prefill, decode, job, has_fault))
        if has_fault:
            time.sleep(rng.random() * 0.03)
            for instance in (prefill, decode):
                runners[instance].do(lambda i=instance, j=job: i.call("cancel", j.key))  # type: ignore[misc]
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.02)
    deadline = time.monotonic() + DEADLINE_S
    everyone = list(runners)

    def is_over() -> bool:
        answered = all(j.key in p.ends and j.key in d.ends for p, d, j, _ in jobs)
        return answered and all(instance.is_quiet() for instance in everyone)

    while not is_over():
        assert all(runner.error is None for runner in runners.values()), [
            runner.error for runner in runners.values()
        ]
        assert time.monotonic() < deadline, [instance.stats() for instance in everyone]
        time.sleep(0.01)
    for runner in runners.values():
        runner.stop()
    for prefill, decode, job, has_fault in jobs:
        if not has_fault:
            assert prefill.ends[job.key].code is Code.OK, prefill.ends[job.key]
            assert decode.ends[job.key].code is Code.OK, decode.ends[job.key]
    for instance in everyone:
        assert len(instance.free[FULL]) == POOL
        assert len(set(instance.free[FULL])) == POOL
    for decode in decodes:
        assert decode.managers[0].num_free_slots == 3
    assert sum(len(decode.landed) for decode in decodes) > num_requests // 3


@pytest.mark.parametrize("engine", ["shared_memory", "tcp"])
def test_many_requests_with_clients_that_leave(site: Site, engine: str) -> None:
    run_soak(site, engine, seed=7, num_requests=60, faults=0.3)


@pytest.mark.fuzz
@pytest.mark.parametrize("engine", ["in_process", "shared_memory", "tcp"])
@pytest.mark.parametrize("seed", range(20))
def test_very_many_requests(site: Site, engine: str, seed: int) -> None:
    run_soak(site, engine, seed=seed, num_requests=200, faults=0.3)
