"""Requests reach the right DP rank, outputs their request, and nobody waits for the dead."""

import asyncio

import pytest
import zmq

from inferkit.core.messages import Abort, Generate, LoopState, Output, Stop, WorkerReady, encode
from inferkit.core.request import FinishReason
from inferkit.core.sampling_params import SamplingParams
from inferkit.online.dispatcher import Work
from inferkit.online.errors import GenerationFailed, Unavailable
from inferkit.online.instance import Attempts, Instance
from inferkit.online.worker_link import WorkerLink
from tests.online.serving import EchoWorker, dispatching, run


def work(num_prompt=2, max_tokens=3, room=1, **changes):
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    values = {"token_ids": list(range(num_prompt)), "sampling": sampling, "seed": 0, "room": room}
    return Work(**{**values, **changes})


async def ready(dispatcher):
    while not dispatcher.are_ranks_ready:
        await dispatcher.changed.wait()
        dispatcher.changed.clear()


async def received(worker, kind, count=1):
    while len(found := [m for m in worker.received if isinstance(m, kind)]) < count:
        await asyncio.sleep(0.002)
    return found


def test_outputs_come_in_order_and_end_with_a_reason():
    async def check():
        async with dispatching() as (dispatcher, parent, context):
            worker = EchoWorker(context, parent)
            worker.start()
            await ready(dispatcher)
            stream = dispatcher.submit(work(num_prompt=2, max_tokens=5, request_id="mine"))
            outputs = [output async for output in stream]
            assert [output.token_ids for output in outputs] == [[0], [1], [0], [1], [0]]
            assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
            assert stream.is_over and dispatcher.num_running == 0
            (message,) = worker.received
            assert (message.request_id, message.room) == ("mine", 1)
            worker.stop()

    run(check())


def test_nobody_is_asked_before_a_rank_is_ready():
    async def check():
        async with dispatching() as (dispatcher, parent, context):
            with pytest.raises(Unavailable, match="not loaded yet"):
                dispatcher.submit(work())
            assert not dispatcher.are_ranks_ready

    run(check())


def test_the_rank_with_the_least_outstanding_tokens_is_chosen():
    async def check():
        async with dispatching(dp_size=2) as (dispatcher, parent, context):
            workers = [EchoWorker(context, parent, dp_rank=rank) for rank in range(2)]
            for worker in workers:
                worker.is_silent = True
                worker.start()
            await ready(dispatcher)
            costs = [10, 3, 3, 3, 3, 1, 1]
            ranks = [dispatcher.submit(work(cost, 1)).dp_rank for cost in costs]
            # 11 | 4 | 8 | 12, then rank 0, ...
            assert ranks == [0, 1, 1, 1, 0, 1, 1]
            assert dispatcher.submit(work(), dp_rank=1).dp_rank == 1
            stats = dispatcher.rank_stats()
            assert [entry["outstanding_tokens"] for entry in stats] == [15, 21]
            assert [entry["num_requests"] for entry in stats] == [2, 6]
            dispatcher.fail(GenerationFailed("over"))
            for worker in workers:
                worker.stop()

    run(check())


def test_tokens_that_have_come_are_no_longer_outstanding():
    async def check():
        async with dispatching() as (dispatcher, parent, context):
            worker = EchoWorker(context, parent)
            worker.is_silent = True
            worker.start()
            await ready(dispatcher)
            stream = dispatcher.submit(work(num_prompt=7, max_tokens=50))
            assert stream.num_outstanding == 57
            await received(worker, Generate)
            worker.is_silent = False
            await anext(stream)
            assert stream.num_outstanding <= 49
            async for _ in stream:
                pass
            assert dispatcher.rank_stats()[0]["outstanding_tokens"] == 0
            worker.stop()

    run(check())


def test_an_attempt_is_never_used_twice():
    attempts = Attempts()
    numbers = {attempts.next() for _ in range(1000)}
    assert len(numbers) == 1000
    assert attempts.next() not in {Attempts().next() for _ in range(1000)}


def test_cancel_frees_the_request_at_the_worker_and_drops_what_comes_late():
    async def check():
        async with dispatching() as (dispatcher, parent, context):
            worker = EchoWorker(context, parent, tick_s=0.005)
            worker.start()
            await ready(dispatcher)
            stream = dispatcher.submit(work(max_tokens=10_000))
            await anext(stream)
            stream.cancel("no reason")
            stream.cancel("no reason")
            assert dispatcher.num_running == 0
            (message,) = await received(worker, Abort)
            assert message.key == stream.key and message.reason == "no reason"
            while worker.running or not dispatcher.num_late_outputs:
                await asyncio.sleep(0.002)
            worker.stop()

    run(check())


def test_abort_lets_the_stream_end_by_itself():
    async def check():
        async with dispatching() as (dispatcher, parent, context):
            worker = EchoWorker(context, parent, tick_s=0.005)
            worker.start()
            await ready(dispatcher)
            stream = dispatcher.submit(work(max_tokens=10_000))
            await anext(stream)
            stream.abort("asked for")
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason is FinishReason.ABORT
            worker.stop()

    run(check())


def test_a_failure_reaches_every_stream_at_once_and_refuses_new_requests():
    async def check():
        async with dispatching() as (dispatcher, parent, context):
            worker = EchoWorker(context, parent)
            worker.is_silent = True
            worker.start()
            await ready(dispatcher)
            streams = [dispatcher.submit(work(room=room)) for room in range(1, 4)]
            waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await asyncio.sleep(0)
            dispatcher.fail(GenerationFailed("rank 0 was killed"))
            for future in waiting:
                with pytest.raises(GenerationFailed, match="rank 0 was killed"):
                    await future
            with pytest.raises(Unavailable, match="rank 0 was killed"):
                dispatcher.submit(work())
            assert dispatcher.num_running == 0
            assert not dispatcher.are_ranks_ready
            worker.stop()

    run(check())


def test_a_rank_that_is_not_connected_any_more_is_noticed_at_once():
    """ROUTER would drop the message without a word."""

    async def check():
        async with dispatching() as (dispatcher, parent, context):
            worker = EchoWorker(context, parent)
            worker.start()
            await ready(dispatcher)
            worker.stop()
            while True:
                stream = dispatcher.submit(work())
                try:
                    async with asyncio.timeout(0.2):
                        await anext(stream)
                except TimeoutError:
                    continue  # the sockets have not noticed yet
                except Unavailable as error:
                    assert "DP rank 0 is not connected" in str(error)
                    break

    run(check())


def test_messages_of_strangers_change_nothing():
    async def check():
        async with dispatching() as (dispatcher, parent, context):
            link = WorkerLink(context=context, parent=parent, dp_rank=0)
            link.connect()
            header = parent.instance.header
            former = Instance.draw("serve").header | {"peer_epoch": header["peer_epoch"]}
            link.announce(b"\x00\xff")
            link.announce(encode(WorkerReady(**former, dp_rank=0)))
            link.announce(encode(WorkerReady(**header, dp_rank=1)))
            link.send([b"", b"\xc1", encode(Stop(**header))])
            link.send([encode(WorkerReady(**header, dp_rank=0))])
            link.send([encode(Output(**header, room=5, attempt=5, index=0, token_ids=[1]))])
            link.send([encode(Output(**former, room=5, attempt=5, index=0, token_ids=[1]))])
            state = {"num_ticks": 1, "num_steps": 1, "num_waiting": 0, "num_running": 0}
            state |= {"kv_used": 0, "kv_total": 1}
            link.send([encode(LoopState(**header, dp_rank=7, **state))])
            while dispatcher.dropped().get("late") != 1 or len(dispatcher.dropped()) < 3:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.02)
            assert dispatcher.dropped() == {"malformed": 4, "epoch": 2, "late": 1}
            assert dispatcher.failure is None and not dispatcher.are_ranks_ready
            link.close()

    run(check())


def test_a_silent_loop_is_found():
    async def check():
        now_s = 100.0
        async with dispatching(clock=lambda: now_s) as (dispatcher, parent, context):
            assert dispatcher.silent_ranks(5.0) == [], "a rank that loads is not silent"
            worker = EchoWorker(context, parent)
            worker.start()
            await ready(dispatcher)
            worker.stop()
            await asyncio.sleep(0.05)
            now_s = 104.0
            assert dispatcher.silent_ranks(5.0) == []
            now_s = 106.0
            assert dispatcher.silent_ranks(5.0) == [0]

    run(check())


def test_workers_are_told_to_stop():
    async def check():
        async with dispatching(dp_size=2) as (dispatcher, parent, context):
            workers = [EchoWorker(context, parent, dp_rank=rank) for rank in range(2)]
            for worker in workers:
                worker.start()
            await ready(dispatcher)
            dispatcher.stop_workers()
            for worker in workers:
                await received(worker, Stop)
                worker.thread.join(10)
                assert not worker.thread.is_alive()

    run(check())


def test_ports_are_chosen_and_told():
    from inferkit.online.dispatcher import DPDispatcher

    async def check():
        dispatcher = DPDispatcher(instance=Instance.draw("serve"), dp_size=1, clock=lambda: 0.0)
        parent = await dispatcher.start()
        try:
            assert parent.request_url.startswith("tcp://127.0.0.1:")
            assert parent.output_url.startswith("tcp://127.0.0.1:")
            port = int(parent.request_url.rpartition(":")[2])
            taken = DPDispatcher(
                instance=Instance.draw("serve"), dp_size=1, clock=lambda: 0.0, port=port
            )
            with pytest.raises(zmq.ZMQError, match="Address already in use"):
                await taken.start()
            await taken.close()
        finally:
            await dispatcher.close()

    run(check())
