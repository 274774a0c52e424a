"""The loop of a rank over a model with a memory: what it is told, what it tells, what is left."""

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferkit.core.messages import WorkerReady, encode
from inferkit.core.request import FinishReason
from inferkit.core.sampling_params import SamplingParams
from inferkit.online.loop import BLOCKED_WAIT_MS, IDLE_WAIT_MS
from inferkit.online.output_sender import HEARTBEAT_S
from tests.fakes import next_token
from tests.online.looping import INSTANCE, abort, generate, make_rank, stop


def expected(message):
    """Tokens that the fake model generates for a request."""
    history = list(message.token_ids)
    for _ in range(message.sampling.max_tokens):
        history.append(next_token(history))
    return history[len(message.token_ids) :]


def test_requests_are_computed_together_and_told_token_by_token():
    rank = make_rank()
    messages = [generate(room, prompt_len=room + 1, max_tokens=5) for room in range(1, 6)]
    rank.wire.put(*messages)
    rank.run_dry()
    assert len(rank.engine.batches) == 5
    for message in messages:
        assert rank.wire.tokens(message.key) == expected(message)
        outputs = rank.wire.outputs(message.key)
        assert [len(output.token_ids) for output in outputs] == [1] * 5
        assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
    rank.check_empty()


def test_a_request_that_comes_later_joins_those_that_run():
    rank = make_rank()
    first, second = generate(1, max_tokens=10), generate(2, max_tokens=3)
    rank.wire.put(first)
    rank.ticks(4)
    rank.wire.put(second)
    rank.run_dry()
    assert rank.wire.tokens(first.key) == expected(first)
    assert rank.wire.tokens(second.key) == expected(second)
    assert len(rank.engine.batches) == 10


def test_a_token_that_came_without_a_step_is_told_before_the_step():
    rank = make_rank()
    message = generate(1, max_tokens=4)
    rank.wire.put(message)
    forward = rank.engine.forward_batch
    # What prefill is to a decode instance: a first token between two steps.
    firsts = [lambda: rank.scheduler.run_step(rank.engine).new_tokens]
    num_told = []

    def watched(batch):
        num_told.append(len(rank.wire.tokens(message.key)))
        return forward(batch)

    rank.engine.forward_batch = watched
    rank.scheduler.advance_queues = lambda: firsts.pop()() if firsts else {}
    rank.run_dry()
    assert num_told == [0, 1, 2, 3]
    assert rank.wire.tokens(message.key) == expected(message)
    rank.check_empty()


def test_the_same_room_may_run_twice_but_an_attempt_only_once():
    rank = make_rank()
    first = generate(1)
    again = generate(1, attempt=5)
    rank.wire.put(first, again, first)
    rank.run_dry()
    for message in (first, again):
        assert rank.wire.tokens(message.key) == expected(message)
    assert len(rank.engine.batches[0].rows) == 2
    rank.check_empty()


def altered(message, **changes):
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(message)) | changes)


@pytest.mark.parametrize(
    ("frame", "detail"),
    [
        (encode(generate(9, token_ids=[1, 60_000])), r"prompt: token ids \[60000\]"),
        (encode(generate(9, token_ids=[])), "it holds no token"),
        (encode(generate(9, sampling=SamplingParams())), "max_tokens: it is missing"),
        (
            encode(generate(9, sampling=SamplingParams(max_tokens=1, repetition_penalty=1e-30))),
            "repetition_penalty=1e-30",
        ),
        (
            encode(generate(9, sampling=SamplingParams(max_tokens=1, stop_token_ids=(5,) * 65))),
            "65 entries",
        ),
        (altered(generate(9), sampling={"temperature": -1.0}), "temperature=-1.0 is out of range"),
        (altered(generate(9), token_ids=["a"]), "Expected `int`"),
        (altered(generate(9), surprise=1), "unknown field"),
    ],
)
def test_a_wrong_request_is_answered_and_the_others_go_on(frame, detail):
    rank = make_rank()
    good = generate(1)
    rank.wire.put(good)
    rank.wire.frames += [frame, b"\xc1"]
    rank.run_dry()
    (output,) = rank.wire.outputs(generate(9).key)
    assert output.finish_reason is FinishReason.REFUSED
    assert re.search(detail, output.finish_detail)
    assert rank.wire.tokens(good.key) == expected(good)
    rank.check_empty()


def test_messages_for_others_are_dropped_and_counted():
    rank = make_rank()
    stranger = generate(9, epoch=5)
    former = generate(9, peer_epoch=5)
    rank.wire.put(stranger, former, WorkerReady(**INSTANCE.header, dp_rank=0), generate(1))
    rank.run_dry()
    assert not rank.wire.outputs(stranger.key)
    assert rank.wire.states()[-1].num_dropped == 3


def test_what_can_never_run_is_refused_in_the_same_tick_while_others_run():
    rank = make_rank(num_blocks=8)
    rank.wire.put(generate(1, max_tokens=12))
    rank.ticks(2)
    long, large = generate(2, prompt_len=64), generate(3, prompt_len=20, max_tokens=20)
    rank.wire.put(long, large)
    rank.ticks(1)
    (output,) = rank.wire.outputs(long.key)
    assert output.finish_reason is FinishReason.PROMPT_TOO_LONG
    (output,) = rank.wire.outputs(large.key)
    assert output.finish_reason is FinishReason.REFUSED
    assert "the full_attention pool has 7" in output.finish_detail
    rank.run_dry()
    rank.check_empty()


def test_abort_frees_a_request_wherever_it_is():
    rank = make_rank(num_blocks=8)
    running, waiting = generate(1, max_tokens=12), generate(2, prompt_len=24, max_tokens=4)
    rank.wire.put(running, waiting)
    rank.ticks(2)
    assert len(rank.scheduler.waiting_queue) == 1
    rank.wire.put(abort(waiting), abort(generate(7)))
    rank.ticks(1)
    assert rank.wire.outputs(waiting.key)[-1].finish_reason is FinishReason.ABORT
    rank.wire.put(abort(running), abort(running))
    rank.ticks(1)
    assert rank.wire.outputs(running.key)[-1].finish_reason is FinishReason.ABORT
    rank.check_empty()
    rank.wire.put(abort(running))
    rank.ticks(1)
    assert len([o for o in rank.wire.outputs(running.key) if o.finish_reason]) == 1


def test_a_request_whose_time_is_over_is_aborted():
    rank = make_rank()
    hasty, patient = (
        generate(1, max_tokens=30, remaining_ms=2000),
        generate(2, max_tokens=30, remaining_ms=60_000),
    )
    rank.wire.put(hasty, patient, generate(3, max_tokens=30))
    rank.ticks(3)
    rank.clock.now_s += 1.9
    rank.ticks(1)
    assert len(rank.scheduler.running_requests) == 3
    rank.clock.now_s += 0.2
    rank.ticks(1)
    assert rank.wire.outputs(hasty.key)[-1].finish_reason is FinishReason.ABORT
    assert len(rank.scheduler.running_requests) == 2
    rank.run_dry()
    assert rank.wire.tokens(patient.key) == expected(patient)
    rank.check_empty()


def test_stop_leaves_the_loop():
    rank = make_rank()
    rank.wire.put(generate(1, max_tokens=30))
    rank.ticks(2)
    rank.wire.put(stop())
    rank.loop.run()
    assert rank.loop.is_over and rank.loop.num_ticks == 3


def test_only_an_idle_loop_waits():
    rank = make_rank()
    rank.ticks(2)
    rank.wire.put(generate(1, max_tokens=3))
    rank.ticks(5)
    assert rank.wire.waits == [0, IDLE_WAIT_MS, IDLE_WAIT_MS, 0, 0, 0, IDLE_WAIT_MS]


def test_requests_that_wait_for_pinned_blocks_do_not_spin():
    rank = make_rank(num_blocks=8)
    pool = rank.scheduler.kv_cache.managers["full_attention"].pool
    blocks = pool.get_new_blocks(6)
    pool.pin(blocks)
    pool.free_blocks(blocks)
    message = generate(1, prompt_len=12, max_tokens=2)
    rank.wire.put(message)
    rank.ticks(3)
    assert rank.wire.waits[1:] == [BLOCKED_WAIT_MS] * 2
    pool.unpin(blocks)
    rank.run_dry()
    assert rank.wire.tokens(message.key) == expected(message)


def test_the_parent_hears_of_every_step_and_of_an_idle_loop_now_and_then():
    rank = make_rank()
    rank.ticks(3)
    assert len(rank.wire.states()) == 1
    rank.clock.now_s += HEARTBEAT_S
    rank.ticks(2)
    assert len(rank.wire.states()) == 2
    rank.wire.put(generate(1, prompt_len=6, max_tokens=2))
    rank.ticks(1)
    assert rank.wire.states()[-1].kv_used == 2 and rank.wire.states()[-1].num_running == 1
    rank.ticks(1)
    state = rank.wire.states()[-1]
    assert (state.kv_used, state.num_running, state.num_steps) == (0, 0, 2)
    assert state.kv_total == 99


def test_cached_tokens_of_a_prompt_are_told():
    rank = make_rank()
    for attempt in (1, 2):
        rank.wire.put(generate(1, prompt_len=9, attempt=attempt))
        rank.run_dry()
    assert rank.wire.outputs((1, 1))[-1].num_cached_tokens == 0
    assert rank.wire.outputs((1, 2))[-1].num_cached_tokens == 8


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_of_requests_and_aborts_leaves_nothing_behind(data):
    rank = make_rank(num_blocks=data.draw(st.integers(8, 20)))
    sent = []
    for _ in range(data.draw(st.integers(1, 40))):
        kind = data.draw(st.sampled_from(["generate", "abort", "tick", "time"]))
        if kind == "generate":
            message = generate(
                len(sent) + 1,
                prompt_len=data.draw(st.integers(1, 20)),
                max_tokens=data.draw(st.integers(1, 8)),
                remaining_ms=data.draw(st.sampled_from([0, 1000, 5000])),
            )
            sent.append(message)
            rank.wire.put(message)
        elif kind == "abort" and sent:
            rank.wire.put(abort(data.draw(st.sampled_from(sent))))
        elif kind == "time":
            rank.clock.now_s += data.draw(st.floats(0, 2))
        else:
            rank.ticks(1)
    rank.run_dry()
    rank.check_empty()
    for message in sent:
        *_, last = rank.wire.outputs(message.key)
        ends = [output for output in rank.wire.outputs(message.key) if output.finish_reason]
        assert len(ends) == 1 and last is ends[0]
        tokens = rank.wire.tokens(message.key)
        assert tokens == expected(message)[: len(tokens)]
        if last.finish_reason == "length":
            assert tokens == expected(message)
