"""Hand-offs between managers over real sockets and engines, without faults."""

from typing import Any

import pytest

from inferkit.kv_transfer.actions import Code
from tests.kv_transfer.manager_ranks import (
    GQA,
    MIXED,
    Layer,
    Site,
    hand_over,
    make_job,
    pump,
)

ENGINES = ("in_process", "shared_memory", "tcp")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("model", [GQA, MIXED], ids=["gqa", "mixed"])
def test_kv_arrives_byte_for_byte(site: Site, engine: str, tp: tuple[int, int], model: Any) -> None:
    prefill, decode = site.use(engine).pair(tp, model=model)
    jobs = [make_job(prefill, decode, kv_len) for kv_len in (1, 10, 16)]
    hand_over(prefill, decode, jobs, {jobs[1].key: (3, 8), jobs[2].key: (4, 12)})
    for job in jobs:
        decode.call("complete", job.key)
    pump([decode], decode.is_quiet)
    prefill.check_empty()
    decode.check_empty()
    assert all(end.code is Code.OK for end in decode.ends.values())


def test_blocks_before_a_window_stay_where_they_are(site: Site) -> None:
    prefill, decode = site.use("tcp").pair(model=(Layer(), Layer(window=6)))
    job = make_job(prefill, decode, 19)
    hand_over(prefill, decode, [job], {job.key: (5, 13)})


def test_the_first_token_may_end_a_request(site: Site) -> None:
    prefill, decode = site.use("shared_memory").pair((2, 1))
    job = make_job(prefill, decode)
    prefill.finishes.add(job.key)
    decode.generate(job)
    prefill.generate(job, (4,))
    pump([prefill, decode], lambda: job.key in decode.finished)
    assert decode.finished[job.key].status.first_token == 77
    pump([prefill, decode], lambda: prefill.is_quiet() and decode.is_quiet())
    assert (prefill.ends[job.key].code, decode.ends[job.key].code) == (Code.OK, Code.OK)
    prefill.check_empty()
    decode.check_empty()
