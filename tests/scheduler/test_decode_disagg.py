import logging
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferkit.core.request import FinishReason, RequestState, TokenLogprobs
from inferkit.kv_transfer.decode_record import DecodePhase
from inferkit.kv_transfer.identity import TransferKey
from inferkit.scheduler.scheduler import MAX_HEAD_SKIPS
from tests.fakes import make_request
from tests.scheduler.handoff import Link, poison
from tests.scheduler.test_scheduler import expected_output


def key(request_id):
    return TransferKey(100 + request_id, 7)


def calls(link, name):
    return [call[1] for call in link.decode_side.calls if call[0] == name]


def until_running(link, *request_ids):
    link.run(until=lambda: all(idx in link.decode.running_requests for idx in request_ids))


def check_outputs(link, window=None):
    """Tokens are those of an instance that does all of it, and every one was told once."""
    for request_id, (_, half) in link.requests.items():
        expected = expected_output(half, half.max_tokens, window)
        assert half.output_token_ids == expected
        assert link.tokens["d"][request_id] == expected
        assert half.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)])
@pytest.mark.parametrize("max_prefill_tokens", [9, 2048])
def test_tokens_are_those_of_one_instance(windows, max_prefill_tokens):
    link = Link(windows=windows, max_prefill_tokens=max_prefill_tokens)
    for request_id, prompt_len in enumerate((3, 4, 5, 17, 30, 1)):
        link.add(request_id, prompt_len, 12)
    poison(link.decode_engine)
    link.run()
    check_outputs(link, window=6 if windows == (6,) else None)
    link.check_idle()


def test_a_request_goes_through_its_queues():
    link = Link()
    _, half = link.add(0, 6, 3)
    assert list(link.decode.prealloc_queue) == [0] and link.decode.num_waiting == 1
    assert not link.decode.has_work and link.decode.has_handoffs
    link.tick("d")
    assert list(link.decode.transfer_queue) == [0]
    assert link.decode.kv_cache.num_used_blocks == 2 and link.decode_side.num_free_slots == 7
    for _ in range(2):
        link.pump()
        link.tick("p")
        link.tick("p")
    link.pump()
    arrived = link.decode.advance_queues()
    assert arrived == {0: expected_output(half, 1)}
    assert list(link.decode.running_requests) == [0] and half.state is RequestState.RUNNING
    assert half.num_computed_tokens == 6 and link.decode_side.num_free_slots == 8
    link.tick("d")
    link.tick("d")
    assert half.output_token_ids == expected_output(half, 3) and half.is_finished
    link.run()
    link.check_idle()


def test_without_a_limit_a_request_has_half_an_hour():
    link = Link()
    for scheduler, half in zip((link.prefill, link.decode), link.make(0, 8), strict=True):
        half.handoff = replace(half.handoff, remaining_ms=0)
        scheduler.add_request(half)
    for side in (link.prefill_side, link.decode_side):
        assert side.records.records[key(0)].deadline == 1800.0


def test_the_first_logprobs_come_with_the_first_token():
    link = Link()
    entry = TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top=((5, -0.5),))
    halves = link.add(0, 6, 2)
    forward = link.prefill_engine.forward_batch

    def with_logprobs(batch):
        output = forward(batch)
        output.logprobs[0] = [entry]
        return output

    link.prefill_engine.forward_batch = with_logprobs
    link.run()
    assert [half.output_logprobs for half in halves] == [[entry], [entry]]


def test_whole_need_or_nothing():
    """Blocks, a slot and a place, or none of them."""
    link = Link(num_slots=1)
    link.add(0, 8)
    link.add(1, 8)
    link.tick("d")
    assert list(link.decode.transfer_queue) == [0] and list(link.decode.prealloc_queue) == [1]
    assert link.decode.kv_cache.num_used_blocks == 3
    link = Link(batch_size=1)
    link.add(0, 8)
    link.add(1, 8)
    link.tick("d")
    assert list(link.decode.prealloc_queue) == [1]
    assert link.decode.kv_cache.num_used_blocks == 3 and link.decode_side.num_free_slots == 7
    link.run()
    link.check_idle()


def test_reserved_tokens_of_others_stay_free():
    for reserved, expected in ((0, [0, 1, 2]), (8, [0, 1]), (64, [0])):
        link = Link(decode_blocks=11, reserved=reserved)
        for request_id in range(3):
            link.add(request_id, 8)
        link.tick("d")
        assert list(link.decode.transfer_queue) == expected
        link.run()
        link.check_idle()


def test_smaller_requests_pass_a_blocked_head_a_bounded_number_of_times():
    link = Link(decode_blocks=13, batch_size=64, num_slots=64)
    link.add(0, 16, 12)
    until_running(link, 0)
    _, head = link.add(1, 32, 2)
    num_passed = 0
    for request_id in range(2, 60):
        link.add(request_id, 3, 2)
    for _ in range(60):
        link.tick()
        link.pump()
        if 1 in link.decode.prealloc_queue:
            num_passed = len(calls(link, "admit")) - 1
    link.run()
    assert num_passed == MAX_HEAD_SKIPS
    assert head.finish_reason is FinishReason.LENGTH
    check_outputs(link)
    link.check_idle()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_blocks_that_prefill_may_have_given_back_are_not_asked_for(max_tokens):
    """A window of 6: while its tokens 9.. are computed, prefill frees the first block."""
    link = Link(windows=(None, 6), max_prefill_tokens=9)
    link.add(0, 10, max_tokens)
    link.tick("d")
    assert link.decode_cache.block_ids(0)["sliding_window"][0] == 0
    assert link.decode_cache.block_ids(0)["full_attention"][0] != 0
    for request_id in range(1, 9):
        link.add(request_id, 9 + request_id, max_tokens)
    link.run()
    check_outputs(link)
    link.check_idle()


def test_what_can_never_fit_is_refused_at_once():
    link = Link(decode_blocks=5)
    (_, too_long), (_, too_big), (_, fits) = (
        link.make(0, 64),
        link.make(1, 8, 10),
        link.make(2, 16, 1),
    )
    for half in (too_long, too_big, fits):
        link.decode.add_request(half)
    assert too_long.finish_reason is FinishReason.PROMPT_TOO_LONG
    assert too_big.finish_reason is FinishReason.REFUSED
    assert "17 tokens need 5 KV blocks" in too_big.finish_detail
    link.tick("d")
    assert list(link.decode.transfer_queue) == [2]


def test_the_budget_of_a_step_limits_no_prompt():
    link = Link()
    link.decode = type(link.decode)(
        transfer=link.decode_side,
        host_store=link.host_store,
        kv_cache=link.decode_cache,
        max_model_len=64,
        eos_token_ids=frozenset(),
        clock=link.clock,
        batch_size=8,
        max_prefill_tokens=8,
        enable_chunked_prefill=False,
    )
    link.add(0, 20)
    link.run()
    check_outputs(link)


def test_a_request_without_another_half_is_refused():
    link = Link()
    request = make_request(3, 8)
    link.decode.add_request(request)
    assert request.finish_reason is FinishReason.REFUSED
    assert "send it to the router" in request.finish_detail


# -- aborts ----------------------------------------------------------------------------------------


def test_an_abort_while_prefill_writes_keeps_the_blocks():
    link = Link()
    _, half = link.add(0, 8)
    link.tick("d")
    link.pump()
    link.decode.abort(0)
    assert half.finish_reason is FinishReason.ABORT and not link.decode.transfer_queue
    link.tick("d")
    assert link.decode.kv_cache.num_used_blocks == 3 and link.decode.num_in_flight == 1
    assert link.decode._queue_lengths()["draining"] == 1
    link.pump()  # DrainAck
    link.tick("d")
    assert link.decode.kv_cache.num_used_blocks == 0
    link.run()
    link.check_idle()


def test_draining_requests_take_places():
    link = Link(batch_size=1)
    link.add(0, 8)
    link.tick("d")
    link.decode.abort(0)
    link.add(1, 8)
    link.frames.clear()  # neither Handshake nor abort arrives
    for _ in range(3):
        link.tick("d")
    assert list(link.decode.prealloc_queue) == [1]
    link.clock.now_s += 1.0
    link.decode_side.timers()  # the abort is repeated
    link.run()
    link.check_idle()


@pytest.mark.parametrize("num_ticks", range(8))
@pytest.mark.parametrize("sides", [("p",), ("d",), ("p", "d"), ("d", "p")])
def test_an_abort_at_every_moment(num_ticks, sides):
    link = Link(max_prefill_tokens=9, prefix_cache=True)
    link.add(0, 20, 40)
    link.add(1, 6, 3)
    for _ in range(num_ticks):
        link.tick()
        link.pump(num_writes=1)
    for side in sides:
        (link.prefill if side == "p" else link.decode).abort(0)
    link.run(tick_s=1.0)
    link.check_idle()
    assert link.tokens["d"][1] == expected_output(link.requests[1][1], 3)


# -- retraction ------------------------------------------------------------------------------------


def squeeze(**kwargs):
    """Two requests that grow into a pool that holds one and a half of them."""
    link = Link(**{"decode_blocks": 11, "host_blocks": 10, **kwargs})
    link.add(0, 8, 20)
    link.add(1, 8, 20)
    until_running(link, 0, 1)
    return link


@pytest.mark.parametrize("windows", [(None,), (None, 6), (None, 9)])
def test_the_youngest_is_retracted_and_resumes_bit_for_bit(windows):
    link = squeeze(windows=windows)
    engine = link.decode_engine
    forward = engine.forward_batch

    def poisoned(batch):
        poison(engine)
        return forward(batch)

    engine.forward_batch = poisoned
    link.run()
    check_outputs(link)
    link.check_idle()
    assert set(calls(link, "retract")) == {key(1)} == set(calls(link, "resume"))
    assert [half.num_preemptions for _, half in link.requests.values()] == [0, 1]
    assert not any(batch.is_prefill for batch in engine.batches), "no prompt is computed again"
    assert len(calls(link, "admit")) == 2, "nor handed over again"


def test_blocks_are_free_only_when_the_copy_is_complete():
    link = squeeze()
    link.decode_side.is_copying = True
    link.run(until=lambda: 1 in link.decode.retracted_queue)
    for _ in range(5):
        link.tick()
    assert link.decode.kv_cache.num_used_blocks == 10
    assert calls(link, "retract") == [key(1)]
    link.decode_side.is_copying = False
    link.decode_side.finish_copies()
    link.run()
    check_outputs(link)
    link.check_idle()


def test_an_abort_while_it_is_copied_waits_for_the_copy():
    link = squeeze()
    link.decode_side.is_copying = True
    link.run(until=lambda: 1 in link.decode.retracted_queue)
    link.decode.abort(1)
    assert link.requests[1][1].finish_reason is FinishReason.ABORT
    link.tick()
    assert link.decode.kv_cache.num_used_blocks == 10 and link.host_store.num_requests == 1
    link.decode_side.finish_copies()
    link.run()
    link.check_idle()


def test_an_abort_in_host_memory_gives_its_place_back():
    link = squeeze()
    link.run(until=lambda: 1 in link.decode.retracted_queue)
    link.tick()
    assert link.decode_side.records.records[key(1)].phase is DecodePhase.RETRACTED
    link.decode.abort(1)
    assert link.host_store.num_requests == 0
    link.run()
    link.check_idle()


def test_retracted_requests_come_back_before_new_ones_are_admitted():
    link = squeeze()
    link.run(until=lambda: 1 in link.decode.retracted_queue)
    link.add(2, 1, 2)
    for _ in range(4):
        link.tick()
        link.pump()
    assert list(link.decode.prealloc_queue) == [2]
    link.run()
    assert link.decode_side.calls.index(("resume", key(1))) < link.decode_side.calls.index(
        ("admit", key(2))
    )
    check_outputs(link)


def test_where_the_youngest_does_not_fit_into_the_store_another_is_chosen():
    """Store of 3 blocks: the youngest has 4, the one before it 2."""
    link = Link(decode_blocks=11, host_blocks=3)
    for request_id, (prompt_len, max_tokens) in enumerate(((9, 16), (4, 12), (12, 8))):
        link.add(request_id, prompt_len, max_tokens)
    until_running(link, 0, 1, 2)
    link.run()
    assert calls(link, "retract")[:1] == [key(1)]
    check_outputs(link)
    link.check_idle()


def test_without_a_store_only_what_surely_fits_runs():
    link = Link(decode_blocks=11, host_blocks=0)
    link.add(0, 8, 20)
    link.add(1, 8, 20)
    link.add(2, 4, 2)
    link.tick("d")
    assert list(link.decode.transfer_queue) == [0, 1]
    link.run()
    assert calls(link, "retract") == []
    check_outputs(link)
    link.check_idle()


def test_the_last_running_request_is_never_retracted():
    link = Link(decode_blocks=8, host_blocks=7)
    link.add(0, 8, 20)
    link.run()
    assert calls(link, "retract") == []
    check_outputs(link)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_every_request_ends_with_its_own_tokens_however_small_the_pools(data):
    windows = data.draw(st.sampled_from([(None,), (None, 6), (6,)]))
    pool = data.draw(st.integers(9, 24))
    link = Link(
        windows=windows,
        prefill_blocks=data.draw(st.integers(9, 16)),
        decode_blocks=pool,
        host_blocks=data.draw(st.integers(0, pool)),
        num_slots=data.draw(st.integers(1, 4)),
        batch_size=data.draw(st.integers(1, 6)),
        reserved=data.draw(st.sampled_from([0, 4, 64])),
        max_prefill_tokens=data.draw(st.sampled_from([7, 64])),
        max_model_len=32,
        prefix_cache=data.draw(st.booleans()) and len(windows) == 1,
    )
    num_requests = data.draw(st.integers(1, 8))
    for request_id in range(num_requests):
        link.add(request_id, data.draw(st.integers(1, 20)), data.draw(st.integers(1, 12)))
        for _ in range(data.draw(st.integers(0, 3))):
            link.tick()
            link.pump(num_writes=data.draw(st.integers(0, 3)))
    link.run(max_ticks=600)
    check_outputs(link, window=6 if windows == (6,) else None)
    link.check_idle()
    eldest = min(link.requests)
    assert link.requests[eldest][1].num_preemptions == 0


def test_the_status_line_names_the_depth_of_every_queue(caplog):
    link = Link(num_slots=1)
    link.add(0, 8, 8)
    until_running(link, 0)
    link.add(1, 8)
    link.add(2, 8)
    with caplog.at_level(logging.INFO):
        link.tick("d")
    (line,) = [record.message for record in caplog.records if "kind=" in record.message]
    assert "waiting=2 running=1 prealloc=1 transfer=1 retracted=0 draining=0 ms=" in line
