import logging

import pytest

from inferkit.core.errors import ConfigError, RequestError
from inferkit.core.protocols import WriteState
from inferkit.core.request import FinishReason, Pair
from inferkit.kv_transfer.identity import TransferKey
from tests.fakes import make_request
from tests.scheduler.handoff import PAIR, Link
from tests.scheduler.test_scheduler import expected_output


def admit(link, *requests):
    """Requests that decode has admitted; prefill has their Handshakes."""
    for request_id, prompt_len in requests:
        link.add(request_id, prompt_len)
    link.tick("d")
    link.tick("d")
    link.pump(num_writes=0)


def key(request_id):
    return TransferKey(100 + request_id, 7)


def test_a_request_goes_through_its_queues_and_tells_its_first_token_at_once():
    link = Link()
    half, _ = link.add(0, 6)
    assert list(link.prefill.bootstrap_queue) == [0] and link.prefill.num_waiting == 1
    assert not link.prefill.has_work and link.prefill.has_handoffs
    link.tick("p")
    assert list(link.prefill.bootstrap_queue) == [0], "no Handshake yet"
    link.tick("d")
    link.tick("d")
    link.pump()

    link.tick("p")

    assert list(link.prefill.inflight_queue) == [0]
    assert link.tokens["p"] == {0: expected_output(half, 1)}
    assert link.prefill.kv_cache.num_used_blocks == 2
    link.tick("p")
    assert not half.is_finished
    link.pump()
    link.tick("p")
    assert half.finish_reason is FinishReason.LENGTH
    assert half.output_token_ids == expected_output(half, 1)
    assert link.prefill.kv_cache.num_used_blocks == 0 and not link.prefill.has_handoffs


def test_chunks_are_sent_while_the_next_is_computed():
    link = Link(max_prefill_tokens=9)
    admit(link, (0, 20))
    for end in (9, 18, 20):
        link.tick("p")
        assert link.writes.pop().end_token == end
    assert [call[0] for call in link.prefill_side.calls] == [
        "begin",
        "send_chunk",
        "send_chunk",
        "complete",
    ]


def test_blocks_are_taken_when_every_handshake_is_here_and_not_before():
    link = Link()
    link.add(0, 20)
    link.tick("p")
    assert link.prefill.kv_cache.num_used_blocks == 0
    admit(link, (1, 4))
    link.tick("p")
    assert link.prefill.kv_cache.num_used_blocks == 6


def test_one_whose_decode_side_is_slow_holds_up_nobody():
    link = Link()
    link.prefill.add_request(link.make(0, 8)[0])
    admit(link, (1, 8))
    link.tick("p")
    assert list(link.prefill.bootstrap_queue) == [0] and list(link.prefill.inflight_queue) == [1]


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)])
def test_a_prompt_begins_only_if_all_of_it_fits(windows):
    """Pool of 9: a prompt of 24 tokens computes in chunks of 9; another of 16 must not begin and
    starve it."""
    link = Link(prefill_blocks=10, max_prefill_tokens=9, windows=windows)
    admit(link, (0, 24), (1, 16), (2, 12))
    for _ in range(20):
        link.tick("p")
    starts = [call[1] for call in link.prefill_side.calls if call[0] == "begin"]
    if None in windows:
        assert starts == [key(0), key(2)], "the second is passed, it does not fit"
    link.run()
    link.check_idle()
    assert all(half.num_preemptions == 0 for half, _ in link.requests.values())


def test_nothing_is_preempted_where_blocks_are_short():
    link = Link(prefill_blocks=7, max_prefill_tokens=9, batch_size=8)
    for request_id, prompt_len in enumerate((20, 24, 8, 16, 4, 12)):
        link.add(request_id, prompt_len)
    link.run()
    link.check_idle()
    for half, _ in link.requests.values():
        assert half.num_preemptions == 0 and half.finish_reason is FinishReason.LENGTH


def test_requests_that_send_and_drain_take_places():
    link = Link(batch_size=2)
    admit(link, (0, 4), (1, 4), (2, 4))
    link.tick("p")
    assert list(link.prefill.inflight_queue) == [0, 1]
    assert link.prefill.num_in_flight == 2
    link.pump(num_writes=0)
    link.tick("p")
    assert len(link.prefill.inflight_queue) == 2
    link.run()
    link.check_idle()
    assert link.requests[2][0].finish_reason is FinishReason.LENGTH


def test_cached_blocks_are_sent_like_others():
    link = Link(prefix_cache=True)
    link.add(0, 20)
    link.run()
    twin = link.make(1, 20)
    for scheduler, half in zip((link.prefill, link.decode), twin, strict=True):
        half.prompt_token_ids = list(link.requests[0][0].prompt_token_ids)
        scheduler.add_request(half)
    link.run()
    assert twin[0].num_cached_tokens == 16
    assert twin[1].output_token_ids == link.requests[0][1].output_token_ids
    assert link.prefill.kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_first_token_that_ends_the_request_sends_no_slot(max_tokens):
    link = Link(eos_after=None if max_tokens == 1 else {0: 1})
    prefill_half, decode_half = link.add(0, 6, max_tokens)
    link.run()
    link.check_idle()
    reason = FinishReason.LENGTH if max_tokens == 1 else FinishReason.STOP
    assert prefill_half.finish_reason is decode_half.finish_reason is reason
    assert len(decode_half.output_token_ids) == len(prefill_half.output_token_ids) == 1
    assert ("finish", key(0)) in link.prefill_side.calls
    assert link.decode_engine.batches == []


def test_an_abort_ends_at_once_and_frees_when_no_write_is_in_flight():
    link = Link(max_prefill_tokens=9)
    admit(link, (0, 20))
    link.tick("p")
    half = link.requests[0][0]
    link.prefill.abort(0)
    assert half.finish_reason is FinishReason.ABORT and not link.prefill.running_requests
    link.tick("p")
    assert link.prefill.kv_cache.num_used_blocks == 3, "a write reads them"
    assert link.prefill.num_in_flight == 1 and link.prefill.has_handoffs
    (write,) = link.writes
    link.prefill_side.records.on_write_ended(write.write_id, WriteState.DONE)
    link.tick("p")
    assert link.prefill.kv_cache.num_used_blocks == 0 and not link.prefill.has_handoffs


@pytest.mark.parametrize("num_ticks", range(3))
def test_an_abort_in_every_queue(num_ticks):
    link = Link(prefix_cache=True)
    admit(link, (0, 20))
    for _ in range(num_ticks):
        link.tick("p")
    link.prefill.abort(0)
    link.decode.abort(0)
    link.run()
    link.check_idle()


def test_a_request_whose_record_fails_is_not_computed_on():
    link = Link(max_prefill_tokens=9)
    admit(link, (0, 20))
    link.tick("p")
    (write,) = link.writes
    link.prefill_side.records.on_write_ended(write.write_id, WriteState.FAILED, "broken pipe")
    link.writes.clear()
    link.tick("p")
    half = link.requests[0][0]
    assert half.finish_reason is FinishReason.UNAVAILABLE
    assert "broken pipe" in half.finish_detail
    link.tick("p")
    assert len(link.prefill_engine.batches) == 1
    assert link.prefill.kv_cache.num_used_blocks == 0


def test_what_can_never_run_is_refused_at_once_and_decode_is_told():
    link = Link(prefill_blocks=5)
    (too_long, _), (too_big, waits) = link.make(0, 64), link.make(1, 20)
    link.prefill.add_request(too_long)
    link.prefill.add_request(too_big)
    assert too_long.finish_reason is FinishReason.PROMPT_TOO_LONG
    assert too_big.finish_reason is FinishReason.REFUSED
    assert "20 tokens need 5 KV blocks" in too_big.finish_detail
    assert not link.prefill.has_handoffs
    link.decode.add_request(waits)
    for _ in range(3):
        link.tick()
        link.pump()
    assert waits.finish_reason is FinishReason.UNAVAILABLE


def test_only_the_prompt_must_fit():
    link = Link(prefill_blocks=5, decode_blocks=20)
    link.add(0, 16, 40)
    link.run()
    assert len(link.requests[0][1].output_token_ids) == 40


def test_a_request_without_another_half_is_refused():
    link = Link()
    request = make_request(3, 8)
    link.prefill.add_request(request)
    assert request.finish_reason is FinishReason.REFUSED
    assert "send it to the router" in request.finish_detail


def test_a_request_for_another_life_is_unavailable_and_a_busy_room_a_conflict():
    link = Link()
    other = Pair(**{**vars(PAIR), "prefill_epoch": 99})
    old, _ = link.make(0, 8, pair=other)
    link.prefill.add_request(old)
    assert old.finish_reason is FinishReason.UNAVAILABLE and "epoch 99" in old.finish_detail
    first, _ = link.add(1, 8, room=5)
    rival, _ = link.make(2, 8, room=5)
    rival.handoff = type(rival.handoff)(
        room=5, attempt=1 << 40, pair=PAIR, remaining_ms=rival.handoff.remaining_ms
    )
    link.prefill.add_request(rival)
    assert rival.finish_reason is FinishReason.CONFLICT
    assert not first.is_finished


def test_an_attempt_that_comes_twice_is_an_error_and_harms_nobody():
    link = Link()
    link.add(0, 8)
    twin, _ = link.make(1, 8, room=100)
    with pytest.raises(RequestError, match="used before"):
        link.prefill.add_request(twin)
    link.run()
    link.check_idle()
    assert link.tokens["d"][0] == expected_output(link.requests[0][1], 4)


def test_the_status_line_names_the_depth_of_every_queue(caplog):
    link = Link()
    admit(link, (0, 8))
    link.add(1, 8)
    with caplog.at_level(logging.INFO):
        link.tick("p")
    (line,) = [record.message for record in caplog.records if "kind=" in record.message]
    assert "waiting=1 running=0 bootstrap=1 inflight=1 draining=0 ms=" in line


def test_fixed_steps_are_refused():
    link = Link()
    with pytest.raises(ConfigError, match="fixed_steps"):
        type(link.prefill)(
            transfer=link.prefill_side,
            kv_cache=link.prefill_cache,
            max_model_len=64,
            eos_token_ids=frozenset(),
            clock=link.clock,
            batch_size=8,
            fixed_steps=True,
        )
