"""What managers do when a client leaves, a peer dies, or bytes are not what they should be."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from inferkit.core.protocols import FenceState
from inferkit.core.transfer_messages import LeaseRenew, Status, TransferState, encode_transfer
from inferkit.kv_transfer.actions import Code
from inferkit.kv_transfer.decode_manager import WATCH_INTERVAL_S
from inferkit.kv_transfer.decode_record import DecodePhase
from inferkit.kv_transfer.engines.in_process import Fabric, Post
from inferkit.kv_transfer.engines.runs import TransferEngineError
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.manager import TransferThreadError
from inferkit.kv_transfer.prefill_record import PrefillPhase
from inferkit.kv_transfer.timers import TransferTimers
from tests.kv_transfer.manager_ranks import (
    FULL,
    DecodeInstance,
    Job,
    PrefillInstance,
    Site,
    engines,
    hand_over,
    make_job,
    pump,
)
from tests.kv_transfer.ranks_alone import Clock

SHORT = TransferTimers(
    lease_s=1.0, transfer_timeout_s=20.0, handshake_timeout_s=20.0, fence_timeout_s=0.2
)
Both = tuple[PrefillInstance, DecodeInstance]


def phase_of(instance: PrefillInstance | DecodeInstance, job: Job) -> Any:
    record = instance.managers[0].records.records.get(job.key)
    return None if record is None else record.phase


def is_in(instance: PrefillInstance | DecodeInstance, job: Job, phase: Any) -> Callable[[], bool]:
    return lambda: phase_of(instance, job) is phase


def all_quiet(*instances: PrefillInstance | DecodeInstance) -> Callable[[], bool]:
    return lambda: all(instance.is_quiet() for instance in instances)


def check_still_works(prefill: PrefillInstance, decode: DecodeInstance) -> None:
    """Everything was given back, and the next request is served."""
    pump([prefill, decode], all_quiet(prefill, decode))
    prefill.check_empty()
    decode.check_empty()
    job = make_job(prefill, decode)
    hand_over(prefill, decode, [job])
    decode.call("complete", job.key)
    pump([decode], decode.is_quiet)


# -- clients that leave ----------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("phase", [PrefillPhase.BOOTSTRAPPING, PrefillPhase.READY, "computing",
                                   PrefillPhase.SENDING, PrefillPhase.ABORTING])  # fmt: skip
def test_a_request_is_cancelled_at_prefill(site: Site, phase: Any, tp: tuple[int, int]) -> None:
    prefill, decode = site.pair(tp)
    job = make_job(prefill, decode)
    prefill.is_stopped = phase is PrefillPhase.READY
    site.fabric.is_held = phase in (PrefillPhase.SENDING, PrefillPhase.ABORTING)
    if phase is not PrefillPhase.BOOTSTRAPPING:
        decode.generate(job)
    prefill.generate(job, (4, 8))
    if phase == "computing":
        pump([prefill, decode], lambda: job.key in prefill.held)
    elif phase is PrefillPhase.READY:
        pump([prefill, decode], lambda: job.key in prefill.ready)
    elif phase is not PrefillPhase.BOOTSTRAPPING:
        pump([prefill, decode], lambda: len(site.fabric.posts) >= 1)
    prefill.call("cancel", job.key)
    if phase in (PrefillPhase.SENDING, PrefillPhase.ABORTING):
        assert phase_of(prefill, job) is PrefillPhase.ABORTING
        for _ in range(5):
            prefill.tick()
            decode.tick()
        # The writes read the blocks until they end.
        assert job.key in prefill.held and job.key in decode.held
        if phase is PrefillPhase.ABORTING:
            prefill.call("cancel", job.key)
        site.fabric.land_all()
    assert prefill.ends[job.key].code is Code.CANCELLED
    if phase is PrefillPhase.BOOTSTRAPPING:
        decode.generate(job)
    pump([prefill, decode], all_quiet(prefill, decode))
    assert decode.ends[job.key].code is Code.UNAVAILABLE
    site.fabric.is_held = prefill.is_stopped = False
    check_still_works(prefill, decode)


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("phase", list(DecodePhase))
def test_a_request_is_cancelled_at_decode(
    site: Site, phase: DecodePhase, tp: tuple[int, int]
) -> None:
    prefill, decode = site.pair(tp)
    job = make_job(prefill, decode)
    decode.generate(job)
    is_early = phase in (DecodePhase.WAITING, DecodePhase.ADMITTED, DecodePhase.DRAINING)
    if phase is not DecodePhase.WAITING:
        site.fabric.is_held = is_early
        prefill.generate(job)
        if is_early:
            pump([prefill, decode], lambda: len(site.fabric.posts) >= max(tp))
        else:
            pump([prefill, decode], lambda: job.key in decode.landed)
    if phase in (DecodePhase.COPYING, DecodePhase.RETRACTED):
        decode.call("retract", job.key)
    if phase is DecodePhase.RETRACTED:
        for manager in decode.managers:
            manager.on_copied(job.key)
        pump([decode], lambda: job.key in decode.retracted)
        assert job.key not in decode.held
    if phase is DecodePhase.DRAINING:
        decode.call("cancel", job.key)
    assert phase_of(decode, job) is phase

    decode.call("cancel", job.key)
    assert decode.ends[job.key].code is Code.CANCELLED
    if phase is DecodePhase.COPYING:
        decode.tick()
        assert job.key in decode.held  # the copy reads the blocks
        for manager in decode.managers:
            manager.on_copied(job.key)
    elif is_early and phase is not DecodePhase.WAITING:
        pump([prefill, decode], lambda: job.key in prefill.ends)
        assert job.key in decode.held and job.key in prefill.held  # writes may land
        site.fabric.land_all()
        assert prefill.ends[job.key].code is Code.UNAVAILABLE
    pump([prefill, decode], all_quiet(prefill, decode))
    site.fabric.is_held = False
    check_still_works(prefill, decode)


def test_a_retracted_request_resumes(site: Site) -> None:
    prefill, decode = site.pair((1, 2))
    job = make_job(prefill, decode)
    hand_over(prefill, decode, [job])
    decode.call("retract", job.key)
    decode.tick()
    assert job.key not in decode.retracted
    for manager in decode.managers:
        manager.on_copied(job.key)
    decode.tick()
    assert decode.retracted == [job.key] and job.key not in decode.held
    decode.take_blocks(job.key, job.kv_len)
    decode.call("resume", job.key)
    decode.call("complete", job.key)
    assert decode.ends[job.key].code is Code.OK
    check_still_works(prefill, decode)


# -- peers that die --------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["in_process", "shared_memory", "tcp"])
def test_a_dead_decode_instance_holds_no_blocks_of_prefill(site: Site, engine: str) -> None:
    prefill, decode = site.use(engine, timers=SHORT).pair()
    jobs = [make_job(prefill, decode) for _ in range(2)]
    prefill.is_stopped = True
    for job in jobs:
        decode.generate(job)
        prefill.generate(job)
    pump([prefill, decode], lambda: len(prefill.ready) == 2)
    decode.close()
    prefill.ready.pop()  # one is computed and meets a dead peer, one waits
    prefill.is_stopped = False
    pump([prefill], prefill.is_quiet)
    assert [prefill.ends[job.key].code for job in jobs] == [Code.UNAVAILABLE] * 2
    reborn = site.decode(prefill, epoch=23)
    check_still_works(prefill, reborn)


@pytest.mark.parametrize("engine", ["in_process", "shared_memory", "tcp"])
def test_a_decode_instance_restarts_in_the_midst_of_a_transfer(site: Site, engine: str) -> None:
    prefill, decode = site.use(engine, timers=SHORT).pair()
    job = make_job(prefill, decode)
    prefill.is_stopped = True
    decode.generate(job)
    prefill.generate(job)
    pump([prefill, decode], lambda: prefill.ready == [job.key])
    decode.close()
    reborn = site.decode(prefill, epoch=23)
    prefill.is_stopped = False
    other = make_job(prefill, reborn)
    hand_over(prefill, reborn, [other])
    reborn.call("complete", other.key)
    pump([prefill, reborn], all_quiet(prefill, reborn))
    assert prefill.ends[job.key].code is Code.UNAVAILABLE
    # A request that was made for the former life is not for this one.
    late = make_job(prefill, decode)
    reborn.generate(late)
    assert reborn.ends[late.key].code is Code.UNAVAILABLE
    check_still_works(prefill, reborn)


def test_a_dead_prefill_instance_is_fenced(site: Site) -> None:
    prefill, decode = site.pair()
    job = make_job(prefill, decode)
    site.fabric.is_held = True
    decode.generate(job)
    prefill.generate(job)
    pump([prefill, decode], lambda: len(site.fabric.posts) == 1)
    prefill.close()
    for manager in decode.managers:
        manager.lose(prefill.me)
    for manager in decode.managers:
        manager.engine.fence_answer = FenceState.RUNNING
    pump([decode], lambda: decode.stats()["num_fencing"] == 1)
    for _ in range(5):
        decode.tick()
    assert job.key in decode.held
    for manager in decode.managers:
        manager.engine.fence_answer = FenceState.DONE
    pump([decode], decode.is_quiet)
    decode.check_empty()
    assert decode.ends[job.key].code is Code.UNAVAILABLE
    site.fabric.land_all()  # too late: it is refused
    site.fabric.is_held = False
    reborn = site.prefill(epoch=12)
    decode.learn(reborn)
    check_still_works(reborn, decode)


def test_a_new_life_of_prefill_ends_transfers_of_the_former(site: Site) -> None:
    prefill, decode = site.pair()
    job, waiting = make_job(prefill, decode), make_job(prefill, decode)
    site.fabric.is_held = True
    decode.generate(job)
    prefill.generate(job)
    pump([prefill, decode], lambda: len(site.fabric.posts) == 1)
    prefill.close()
    reborn = site.prefill(epoch=12)
    decode.learn(reborn)
    pump([decode], decode.is_quiet)
    assert decode.ends[job.key].code is Code.UNAVAILABLE
    assert decode.stats()["num_quarantined"] == 0
    site.fabric.land_all()
    site.fabric.is_held = False
    decode.generate(waiting)  # for a life that is over: it has no route
    decode.tick()
    assert waiting.key not in decode.held
    decode.call("cancel", waiting.key)
    check_still_works(reborn, decode)


def test_blocks_stay_in_quarantine_where_the_engine_cannot_fence(site: Site) -> None:
    prefill, decode = site.use("in_process", timers=SHORT).pair()
    decode.managers[0].engine.fence_answer = FenceState.UNABLE
    job = make_job(prefill, decode)
    site.fabric.is_held = True
    decode.generate(job)
    prefill.generate(job)
    pump([prefill, decode], lambda: len(site.fabric.posts) == 1)
    decode.call("cancel", job.key)
    pump([prefill, decode], lambda: decode.stats()["num_quarantined"] == 1)
    assert job.key in decode.held
    site.fabric.land_all()
    pump([prefill, decode], all_quiet(prefill, decode))
    assert decode.stats()["num_quarantined"] == 0
    site.fabric.is_held = False
    check_still_works(prefill, decode)


def test_a_lost_write_is_fenced_and_never_acknowledged(site: Site) -> None:
    prefill, decode = site.pair()
    job = make_job(prefill, decode)
    site.fabric.is_held = True
    decode.generate(job)
    prefill.generate(job)
    pump([prefill, decode], lambda: len(site.fabric.posts) == 1)
    site.fabric.lose(site.fabric.posts[0])
    pump([prefill], prefill.is_quiet)  # the source is free
    assert "lost" in prefill.ends[job.key].reason
    pump([decode], decode.is_quiet)
    assert decode.ends[job.key].code is Code.UNAVAILABLE
    site.fabric.land_all()
    site.fabric.is_held = False
    check_still_works(prefill, decode)


def test_a_transfer_that_a_fence_of_another_broke_fails_and_drains(site: Site) -> None:
    prefill, decode = site.pair()
    jobs = [make_job(prefill, decode) for _ in range(2)]
    site.fabric.is_held = True
    for job in jobs:
        decode.generate(job)
        prefill.generate(job)
    pump([prefill, decode], lambda: len(site.fabric.posts) == 2)
    records = decode.managers[0].records.records
    broken = [records[jobs[1].key].transfer_id]
    decode.managers[0].engine.take_broken = lambda: [broken.pop()] if broken else []
    decode.tick()
    assert "another transfer" in decode.ends[jobs[1].key].reason
    assert jobs[1].key in decode.held  # it is not drained by that
    site.fabric.is_held = False
    site.fabric.land_all()
    pump([prefill, decode], lambda: jobs[0].key in decode.landed)
    decode.call("complete", jobs[0].key)
    check_still_works(prefill, decode)


# -- writes that cannot be posted ------------------------------------------------------------------


def test_a_write_that_cannot_be_posted_fails_with_the_reason(site: Site) -> None:
    prefill, decode = site.use("tcp").pair()
    job = make_job(prefill, decode)
    decode.jobs[job.key] = job
    decode.generate(job)
    pump([decode], lambda: decode.managers[0].num_records == 1, 5)
    decode.schedule = lambda: None  # type: ignore[method-assign]
    decode.tick()
    blocks = {FULL: [7, 99, 3]}
    decode.held[job.key] = {FULL: []}
    decode.call("admit", job.key, blocks)
    prefill.generate(job)
    pump([prefill, decode], all_quiet(prefill, decode))
    assert "names block 99" in prefill.ends[job.key].reason
    assert decode.ends[job.key].code is Code.UNAVAILABLE
    del decode.schedule
    check_still_works(prefill, decode)


def test_more_slots_are_written_than_there_are_cells(site: Site) -> None:
    prefill = site.prefill(num_cells=1)
    decode = site.decode(prefill, tp=2, num_cells=4)
    site.fabric.is_held = True
    jobs = [make_job(prefill, decode, 4) for _ in range(3)]
    for job in jobs:
        decode.generate(job)
        prefill.generate(job)
    pump([prefill, decode], lambda: len(site.fabric.posts) == 6)
    site.fabric.land_all()
    # Six slots are to be written now, one at a time.
    pump([prefill, decode], lambda: prefill.stats()["num_writes_queued"] == 5)
    assert len(site.fabric.posts) == 1
    prefill.call("cancel", jobs[1].key)
    site.fabric.is_held = False
    site.fabric.land_all()
    pump([prefill, decode], lambda: jobs[0].key in decode.landed and jobs[2].key in decode.landed)
    for job in (jobs[0], jobs[2]):
        decode.call("complete", job.key)
    check_still_works(prefill, decode)


# -- content ---------------------------------------------------------------------------------------


class FlippingFabric(Fabric):
    """Damages one byte of every batch that is no slot."""

    is_on = False

    def land(self, post: Post, num_runs: int | None = None) -> None:
        target = self.engines[post.peer.description["address"]]
        super().land(post, num_runs)
        run = post.runs[0]
        if self.is_on and run[2] == 0:  # the caches were registered first
            target.arrays[run[2]][run[3] + 5] ^= 1


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)])
def test_a_byte_that_was_damaged_on_the_way_is_noticed(site: Site, tp: tuple[int, int]) -> None:
    fabric = FlippingFabric()
    site.make_engine = engines("in_process")
    site.make_engine.keywords["fabric"] = fabric
    prefill, decode = site.pair(tp, verify_digest=True)
    fabric.is_on = True
    job = make_job(prefill, decode)
    decode.generate(job)
    prefill.generate(job, (4,))
    pump([prefill, decode], all_quiet(prefill, decode))
    assert job.key not in decode.landed
    assert decode.ends[job.key].code is Code.UNAVAILABLE
    assert "is not what arrived" in str(decode.reasons[job.key])
    fabric.is_on = False
    check_still_works(prefill, decode)


def test_layouts_that_do_not_fit_refuse_the_request(site: Site) -> None:
    prefill = site.prefill(verify_digest=True)
    decode = site.decode(prefill)
    job = make_job(prefill, decode)
    decode.generate(job)
    pump([decode], decode.is_quiet)
    assert "verify_digest: prefill has True, decode has False" in decode.ends[job.key].reason

    early = site.decode(name="e", epoch=33)
    job = make_job(prefill, early)
    early.generate(job)
    early.tick()
    assert job.key not in early.ends
    early.learn(prefill)
    pump([early], early.is_quiet)
    assert early.ends[job.key].code is Code.UNAVAILABLE


# -- messages --------------------------------------------------------------------------------------


def test_instances_with_other_secrets_do_not_hear_each_other(site: Site) -> None:
    prefill = site.prefill(secret=b"one", timers=SHORT)
    decode = site.decode(prefill, secret=b"other", timers=SHORT)
    job = make_job(prefill, decode)
    decode.generate(job)
    prefill.generate(job)
    pump([prefill, decode], lambda: prefill.stats().get("dropped_not_authentic", 0) >= 1)
    pump([decode], decode.is_quiet)
    assert decode.ends[job.key].code is Code.UNAVAILABLE
    assert job.key not in prefill.held
    prefill.call("cancel", job.key)

    friend = site.decode(prefill, name="f", epoch=33, secret=b"one")
    check_still_works(prefill, friend)


def test_messages_that_mean_nothing_are_counted(site: Site) -> None:
    prefill, decode = site.pair()
    manager, channel = prefill.managers[0], decode.managers[0].channel
    status = Status(
        instance_id="x",
        epoch=1,
        peer_epoch=prefill.me.epoch,
        transfer_id=1,
        prefill_rank=0,
        state=TransferState.OK,
    )
    renew = LeaseRenew(
        instance_id="x",
        epoch=1,
        peer_epoch=999,
        decode_rank=0,
        reply_address="ipc:///tmp/x",
        transfer_ids=(1,),
        floor=0,
    )
    frame = encode_transfer(renew)
    for bad in (
        b"",
        b"\x00" * 100,
        encode_transfer(status),
        frame,
        frame.replace(b"protocol_version\x01", b"protocol_version\x07"),
    ):
        channel.post(manager.address, bad)
    wanted = {"dropped_malformed": 3, "dropped_wrong_role": 1, "dropped_peer_epoch": 1}
    pump([prefill], lambda: wanted.items() <= prefill.stats().items())
    check_still_works(prefill, decode)


def test_a_transfer_is_open_before_prefill_hears_of_it(site: Site) -> None:
    prefill, decode = site.pair()
    manager, order = decode.managers[0], []
    open_transfer, post = manager.engine.open_transfer, manager.channel.post

    def opening(transfer_id: int) -> None:
        time.sleep(0.05)
        open_transfer(transfer_id)
        order.append("open")

    def posting(address: str, frame: bytes) -> None:
        order.append("post")
        post(address, frame)

    manager.engine.open_transfer, manager.channel.post = opening, posting
    job = make_job(prefill, decode)
    decode.generate(job)
    pump([decode], lambda: job.key in decode.held)
    assert order[:2] == ["open", "post"]
    decode.call("cancel", job.key)
    prefill.generate(job)
    check_still_works(prefill, decode)


# -- life of a manager -----------------------------------------------------------------------------


def test_bootstrap_servers_are_watched_while_requests_wait(site: Site) -> None:
    prefill, decode = site.pair((1, 1))
    manager, clock, urls = decode.managers[0], Clock(), []
    manager.watch, manager.clock = lambda url, peer: urls.append((url, peer)), clock
    expected = ("http://p", prefill.me)
    jobs = [make_job(prefill, decode) for _ in range(2)]
    for job in jobs:
        decode.generate(job)
    assert urls == [expected, expected]
    urls.clear()
    for _ in range(2):
        clock.now_s += WATCH_INTERVAL_S
        for _ in range(3):
            decode.tick()
    assert urls == [expected, expected]
    for job in jobs:
        decode.call("cancel", job.key)
        prefill.generate(job)
    pump([prefill, decode], all_quiet(prefill, decode))
    clock.now_s += WATCH_INTERVAL_S
    decode.tick()
    assert urls == [expected, expected] and manager._urls == {}


def test_ranks_without_requests_do_not_meet(site: Site) -> None:
    _, decode = site.pair((1, 2))
    assert decode.managers[0].tick() == []  # the other rank is not waited for


@pytest.mark.parametrize("thread", ["listener", "writes"])
def test_a_thread_that_dies_is_seen_by_the_next_tick(site: Site, thread: str) -> None:
    prefill, decode = site.pair()
    manager = prefill.managers[0]

    def explode(*args: Any) -> Any:
        raise ZeroDivisionError("a bug")

    if thread == "listener":
        manager.records.on_message = explode
    else:
        manager.engine.write_batch = explode
    job = make_job(prefill, decode)
    decode.generate(job)
    prefill.generate(job)
    with pytest.raises(TransferThreadError, match="a bug"):
        pump([prefill, decode], lambda: False)
    prefill.close()


@pytest.mark.parametrize("engine", ["shared_memory", "tcp"])
def test_an_engine_that_dies_is_seen_by_the_next_tick(site: Site, engine: str) -> None:
    for instance in site.use(engine).pair():
        manager = instance.managers[0]
        manager.engine._fail(ZeroDivisionError("a bug"))
        with pytest.raises(TransferEngineError, match="has stopped: ZeroDivisionError"):
            instance.tick()
        instance.close()


def test_a_manager_closes_at_any_time(site: Site) -> None:
    prefill, decode = site.use("tcp").pair((2, 2))
    prefill.close()
    prefill.close()
    decode.close()
    assert prefill.stats()["num_sending"] == 0


def test_rival_peers_do_not_disturb(site: Site) -> None:
    """Two prefill and two decode instances, requests in all directions."""
    site.use("shared_memory", num_cells=3)
    prefills = [site.prefill("p0", 1), site.prefill("p1", 2, tp=2)]
    decodes = [
        site.decode(*prefills, name="d0", epoch=3, tp=2),
        site.decode(*prefills, name="d1", epoch=4),
    ]
    assert prefills[0].me == Peer("p0", 1)
    jobs = [
        (p, d, make_job(p, d, 5 + 3 * idx))
        for idx in range(3)
        for p in prefills
        for d in decodes
    ]  # fmt: skip
    for p, d, job in jobs:
        d.generate(job)
        p.generate(job, (4,))
    everyone = [*prefills, *decodes]
    done: set[Any] = set()

    def step() -> bool:
        for _, d, job in jobs:
            if job.key in d.landed and job.key not in done:
                done.add(job.key)
                d.call("complete", job.key)
        return len(done) == len(jobs) and all_quiet(*everyone)()

    pump(everyone, step)
    for instance in everyone:
        instance.check_empty()
    assert torch.equal(torch.tensor(len(done)), torch.tensor(12))
