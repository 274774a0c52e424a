import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferkit.core.errors import ConfigError, RequestError
from inferkit.core.request import FinishReason, Request, RequestState
from inferkit.core.sampling_params import SamplingParams
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.scheduler.scheduler import Scheduler
from tests.fakes import FakeClock, MemoryEngine, make_request, make_spec, next_token

EOS = 2


def make(
    *,
    num_blocks=100,
    batch_size=8,
    windows=(None,),
    max_model_len=64,
    prefix_cache=False,
    eos_after=None,
    **kwargs,
):
    kv_cache = KVCacheManager(
        specs=[make_spec(window=window, layer_idx=i) for i, window in enumerate(windows)],
        max_model_len=max_model_len,
        max_num_requests=batch_size,
        free_bytes=1 << 30,
        block_size=4,
        num_blocks=num_blocks,
        enable_prefix_cache=prefix_cache,
    )
    scheduler = Scheduler(
        kv_cache=kv_cache,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
        clock=FakeClock(),
        batch_size=batch_size,
        **kwargs,
    )
    return scheduler, MemoryEngine(kv_cache, eos_after)


def check_one_queue_each(scheduler, requests):
    waiting = {request.request_id for request in scheduler.waiting_queue}
    running, finished = set(scheduler.running_requests), set(scheduler.finished_requests)
    assert waiting | running | finished == {request.request_id for request in requests}
    assert len(waiting) + len(running) + len(finished) == len(requests)
    assert all((request.request_id in finished) == request.is_finished for request in requests)


def run(scheduler, engine, requests, max_steps=500):
    for request in requests:
        scheduler.add_request(request)
    for _ in range(max_steps):
        if not scheduler.has_work:
            break
        assert scheduler.run_step(engine) is not None
        scheduler.kv_cache.check_integrity()
        check_one_queue_each(scheduler, requests)
    assert not scheduler.has_work
    assert scheduler.kv_cache.num_used_blocks == 0
    return requests


def expected_output(request: Request, num_tokens: int, window: int | None = None) -> list[int]:
    history = list(request.prompt_token_ids)
    for _ in range(num_tokens):
        history.append(next_token(history[-(window or len(history)) :]))
    return history[len(request.prompt_token_ids) :]


def row_lens(engine):
    return [[row.num_scheduled_tokens for row in batch.rows] for batch in engine.batches]


def test_a_head_beyond_the_remaining_budget_ends_the_batch():
    """reference.md item 22: prompts 4,4,4,2 with a budget of 10."""
    scheduler, engine = make(enable_chunked_prefill=False, max_prefill_tokens=10)
    run(scheduler, engine, [make_request(i, n, 1) for i, n in enumerate((4, 4, 4, 2))])
    assert row_lens(engine) == [[4, 4], [4, 2]]


def test_prefill_comes_before_decode_without_chunks():
    scheduler, engine = make(enable_chunked_prefill=False, max_prefill_tokens=4)
    run(scheduler, engine, [make_request(0, 4, 3), make_request(1, 4, 3)])
    assert [batch.is_prefill for batch in engine.batches] == [True, True, False, False]


def test_a_long_prompt_is_computed_in_chunks_beside_decodes():
    scheduler, engine = make(max_prefill_tokens=9)
    run(scheduler, engine, [make_request(0, 3, 8), make_request(1, 20, 2)])
    assert row_lens(engine)[:4] == [[3, 6], [8, 1], [6, 1], [1, 1]]
    assert [row.samples for row in engine.batches[1].rows] == [False, True]
    assert engine.batches[1].rows[0].next_prompt_token == 100 + 7 + 14


def test_prompt_longer_than_the_cap_never_runs_without_chunks():
    scheduler, engine = make(enable_chunked_prefill=False, max_prefill_tokens=8)
    (request,) = run(scheduler, engine, [make_request(0, 9)])
    assert request.finish_reason is FinishReason.PROMPT_TOO_LONG
    assert "9 tokens" in request.finish_detail and "max_prefill_tokens=8" in request.finish_detail
    assert engine.batches == []


def test_prompt_longer_than_the_model_length_never_runs():
    scheduler, engine = make(max_model_len=16)
    ok, too_long = run(scheduler, engine, [make_request(0, 15), make_request(1, 16)])
    assert ok.finish_reason is FinishReason.LENGTH and len(ok.output_token_ids) == 1
    assert too_long.finish_reason is FinishReason.PROMPT_TOO_LONG


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    scheduler, engine = make(num_blocks=5)
    fits, refused = run(scheduler, engine, [make_request(0, 8, 9), make_request(1, 8, 10)])
    assert fits.finish_reason is FinishReason.LENGTH
    assert refused.finish_reason is FinishReason.REFUSED
    assert "17 tokens need 5 KV blocks" in refused.finish_detail


def test_eos_ends_at_once_and_frees_blocks():
    scheduler, engine = make(eos_after={0: 3})
    (request,) = run(scheduler, engine, [make_request(0, 5, 10)])
    assert request.finish_reason is FinishReason.STOP
    assert request.output_token_ids[-1] == EOS and len(request.output_token_ids) == 3


def test_eos_as_first_token_gives_one_token():
    scheduler, engine = make(eos_after={0: 1})
    (request,) = run(scheduler, engine, [make_request(0, 5, 10)])
    assert request.output_token_ids == [EOS] and len(engine.batches) == 1


def test_max_tokens_one_gives_one_token():
    scheduler, engine = make()
    (request,) = run(scheduler, engine, [make_request(0, 5, 1)])
    assert len(request.output_token_ids) == 1
    assert request.finish_reason is FinishReason.LENGTH


def test_fixed_steps_decode_exactly_max_new_tokens_times_and_cut_at_eos():
    """reference.md item 24."""
    scheduler, engine = make(fixed_steps=True, max_new_tokens=6, eos_after={0: 3})
    early, late = run(scheduler, engine, [make_request(0, 5), make_request(1, 4, 2)])
    decodes = [batch for batch in engine.batches if not batch.is_prefill]
    assert [len(batch.rows) for batch in decodes] == [2] * 6
    assert len(early.output_token_ids) == 3 and early.finish_reason is FinishReason.STOP
    assert len(late.output_token_ids) == 2 and late.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_forced_phase_without_work_runs_a_dummy_batch(phase):
    """reference.md item 26."""
    scheduler, engine = make()
    assert scheduler.run_step(engine, phase) is None
    (batch,) = engine.batches
    assert batch.is_dummy and batch.is_prefill == (phase == "prefill")
    assert scheduler.kv_cache.num_used_blocks == 0 and not scheduler.has_work


def test_forced_phases_only_run_their_phase():
    scheduler, engine = make()
    request = make_request(0, 5, 3)
    scheduler.add_request(request)
    assert scheduler.run_step(engine, "decode") is None
    assert request.state is RequestState.WAITING
    assert scheduler.run_step(engine, "prefill") is not None
    assert scheduler.run_step(engine, "prefill") is None
    assert request.num_computed_tokens == 5
    assert scheduler.run_step(engine, "decode") is not None
    assert request.output_token_ids == expected_output(request, 2)


def test_more_requests_than_the_batch_are_all_served():
    scheduler, engine = make(batch_size=3)
    requests = run(scheduler, engine, [make_request(i, 3 + i % 5, 4) for i in range(20)])
    for request in requests:
        assert request.output_token_ids == expected_output(request, 4)
    assert max(len(batch.rows) for batch in engine.batches) == 3


def test_smaller_requests_pass_a_head_that_lacks_blocks_but_not_for_ever():
    scheduler, engine = make(num_blocks=12, batch_size=8)
    running = make_request(0, 20, 24)
    head = make_request(1, 36, 4)
    small = [make_request(i, 3, 1) for i in range(2, 60)]
    run(scheduler, engine, [running, head, *small])
    order = [row.request_id for batch in engine.batches for row in batch.rows]
    assert order.index(2) < order.index(1), "nobody passed the head"
    assert order.index(1) < order.index(59), "the head starved"
    assert head.output_token_ids == expected_output(head, 4)


def test_when_blocks_run_short_the_youngest_is_computed_again_with_equal_tokens():
    scheduler, engine = make(num_blocks=8, batch_size=4)
    requests = run(scheduler, engine, [make_request(i, 6, 14) for i in range(3)])
    assert sum(request.num_preemptions for request in requests) > 0
    assert requests[0].num_preemptions == 0
    for request in requests:
        assert request.output_token_ids == expected_output(request, 14)


def test_abort_frees_blocks_in_every_state():
    scheduler, engine = make(batch_size=2, max_prefill_tokens=6)
    requests = [make_request(0, 3, 9), make_request(1, 20, 9), make_request(2, 3, 9)]
    for request in requests:
        scheduler.add_request(request)
    scheduler.run_step(engine)
    states = [request.state for request in requests]
    assert states == [RequestState.RUNNING, RequestState.PREFILLING, RequestState.WAITING]
    for request in requests:
        scheduler.abort(request.request_id)
        scheduler.abort(request.request_id)
        scheduler.kv_cache.check_integrity()
    scheduler.abort(99)
    assert scheduler.kv_cache.num_used_blocks == 0 and not scheduler.has_work


def test_stop_from_outside_wins_over_the_length_limit():
    scheduler, engine = make()
    (request,) = run(scheduler, engine, [make_request(0, 3, 2)])
    scheduler.finish_request(0, FinishReason.STOP)
    assert request.finish_reason is FinishReason.STOP


def test_prefix_hits_compute_less_and_give_the_same_tokens():
    scheduler, engine = make(prefix_cache=True, batch_size=1)
    first = make_request(0, 20, 6)
    second = Request(
        request_id=1,
        prompt_token_ids=first.prompt_token_ids + [7, 8],
        sampling=first.sampling,
        seed=0,
    )
    run(scheduler, engine, [first, second])
    assert second.num_cached_tokens == 20
    assert second.output_token_ids == expected_output(second, 6)


def test_a_request_continues_elsewhere_from_its_written_state():
    whole, engine = make()
    (expected,) = run(whole, engine, [make_request(0, 9, 8)])
    here, engine_here = make()
    request = make_request(0, 9, 8)
    here.add_request(request)
    for _ in range(4):
        here.run_step(engine_here)
    state = request.to_dict()
    there, engine_there = make()
    moved = Request.from_dict(state)
    run(there, engine_there, [moved])
    assert moved.output_token_ids == expected.output_token_ids


def test_window_smaller_than_a_chunk_frees_the_context_of_every_chunk():
    """A chunk longer than the window leaves null blocks; what lies before them is freed too."""
    kv_cache = KVCacheManager(
        specs=[make_spec(window=8)],
        max_model_len=120,
        max_num_requests=1,
        free_bytes=1 << 30,
        block_size=4,
    )
    scheduler = Scheduler(
        kv_cache=kv_cache,
        max_model_len=120,
        eos_token_ids=frozenset({EOS}),
        clock=FakeClock(),
        batch_size=1,
        max_prefill_tokens=20,
    )
    requests = [make_request(i, 100, 10) for i in range(2)]
    run(scheduler, MemoryEngine(kv_cache), requests)
    for request in requests:
        assert request.output_token_ids == expected_output(request, 10, 8)


def test_window_pool_of_automatic_size_runs_the_whole_batch():
    kv_cache = KVCacheManager(
        specs=[make_spec(window=8)],
        max_model_len=64,
        max_num_requests=6,
        free_bytes=1 << 30,
        block_size=8,
    )
    scheduler = Scheduler(
        kv_cache=kv_cache,
        max_model_len=64,
        eos_token_ids=frozenset({EOS}),
        clock=FakeClock(),
        batch_size=6,
        max_prefill_tokens=64,
    )
    engine = MemoryEngine(kv_cache)
    run(scheduler, engine, [make_request(i, 9, 40) for i in range(6)])
    assert sum(len(batch.rows) == 6 for batch in engine.batches) > 30


def test_a_preempted_request_can_be_finished_and_is_in_one_queue():
    scheduler, engine = make(num_blocks=8, batch_size=4)
    requests = [make_request(i, 6, 14) for i in range(3)]
    for request in requests:
        scheduler.add_request(request)
    while not any(request.num_preemptions for request in requests):
        scheduler.run_step(engine)
    (preempted,) = [request for request in requests if request.num_preemptions]
    assert scheduler.waiting_queue[0] is preempted
    scheduler.finish_request(preempted.request_id, FinishReason.STOP)
    check_one_queue_each(scheduler, requests)
    num_tokens = len(preempted.output_token_ids)
    while scheduler.has_work:
        scheduler.run_step(engine)
    assert len(preempted.output_token_ids) == num_tokens


def test_records_count_what_a_step_held_and_preempted():
    scheduler, engine = make(num_blocks=8, batch_size=4)
    for i in range(3):
        scheduler.add_request(make_request(i, 6, 14))
    records = []
    while scheduler.has_work:
        records.append(scheduler.run_step(engine).record)
    assert sum(record.num_preempted for record in records) > 0
    assert records[0].kv_used == 4 and records[-1].kv_used > 0


def test_ignore_eos_goes_on():
    scheduler, engine = make(eos_after={0: 3})
    request = make_request(0, 5, 10)
    request.sampling = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    run(scheduler, engine, [request])
    assert len(request.output_token_ids) == 10 and request.output_token_ids[2] == EOS


def test_fixed_steps_cut_times_with_the_tokens():
    scheduler, engine = make(fixed_steps=True, max_new_tokens=6, eos_after={0: 3})
    (request,) = run(scheduler, engine, [make_request(0, 5)])
    assert len(request.token_times_s) == len(request.output_token_ids) == 3


def test_batch_size_is_divided_over_dp_ranks():
    scheduler, engine = make(batch_size=8, attn_dp_size=4)
    run(scheduler, engine, [make_request(i, 3, 3) for i in range(8)])
    assert max(len(batch.rows) for batch in engine.batches) == 2


def test_times_of_a_request_keep_their_first_values():
    scheduler, engine = make(num_blocks=8, batch_size=4)
    requests = run(scheduler, engine, [make_request(i, 6, 14) for i in range(3)])
    for request in requests:
        assert request.arrival_time_s < request.first_scheduled_time_s < request.token_times_s[0]


def test_a_forgotten_request_leaves_nothing():
    scheduler, engine = make()
    (request,) = run(scheduler, engine, [make_request(0, 3, 2)])
    scheduler.forget(0)
    scheduler.forget(0)
    assert not scheduler.finished_requests
    scheduler.add_request(make_request(0, 3, 2))


def test_few_waiting_requests_are_tried_while_blocks_are_short():
    scheduler, engine = make(num_blocks=12, batch_size=8)
    tried = []
    match_prefix = scheduler.kv_cache.match_prefix

    def counting(request_id, token_ids):
        tried.append(request_id)
        return match_prefix(request_id, token_ids)

    scheduler.kv_cache.match_prefix = counting
    for i in range(500):
        scheduler.add_request(make_request(i, 36, 4))
    scheduler.run_step(engine)
    tried.clear()
    scheduler.run_step(engine)
    assert 0 < len(tried) < 50


def test_budget_must_leave_room_beside_decodes():
    with pytest.raises(ConfigError, match="max_prefill_tokens=8 leaves no room"):
        make(batch_size=8, max_prefill_tokens=8)


def test_wrong_requests_are_refused():
    scheduler, _ = make()
    with pytest.raises(RequestError, match="holds no token"):
        scheduler.add_request(make_request(0, 0))
    scheduler.add_request(make_request(1, 2))
    with pytest.raises(RequestError, match="already known"):
        scheduler.add_request(make_request(1, 2))


@settings(max_examples=80, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12)), min_size=1, max_size=12),
    num_blocks=st.integers(11, 30),
    batch_size=st.integers(1, 5),
    budget=st.integers(6, 40),
    chunked=st.booleans(),
    prefix_cache=st.booleans(),
    windows=st.sampled_from([(None,), (5,), (8,), (None, 5)]),
    num_aborts=st.integers(0, 3),
    pinned=st.booleans(),
)
def test_any_schedule_gives_the_tokens_of_a_serial_run(
    lens, num_blocks, batch_size, budget, chunked, prefix_cache, windows, num_aborts, pinned
):
    scheduler, engine = make(
        windows=windows,
        num_blocks=num_blocks,
        batch_size=batch_size,
        max_prefill_tokens=budget if chunked else max(budget, 24),
        enable_chunked_prefill=chunked,
        prefix_cache=prefix_cache,
    )
    shared = [5] * 9
    requests = []
    for request_id, (prompt_len, max_tokens) in enumerate(lens):
        request = make_request(request_id, prompt_len, max_tokens)
        if request_id % 2:
            request.prompt_token_ids = shared + request.prompt_token_ids[: max(1, prompt_len - 9)]
        requests.append(request)
    pool = next(iter(scheduler.kv_cache.managers.values())).pool
    if pinned:  # a transfer holds blocks for a while
        blocks = pool.get_new_blocks(min(5, pool.num_free))
        pool.pin(blocks)
        pool.free_blocks(blocks)
    for request in requests:
        scheduler.add_request(request)
    aborted = set(range(0, 2 * num_aborts, 2))
    for step in range(1000):
        if not scheduler.has_work:
            break
        progressed = scheduler.run_step(engine)
        scheduler.kv_cache.check_integrity()
        check_one_queue_each(scheduler, requests)
        if step in aborted:
            scheduler.abort(step)
        if pinned and (progressed is None or step == 5):
            pool.unpin(blocks)
            pinned = False
        else:
            assert progressed is not None
    if pinned:
        pool.unpin(blocks)
    assert not scheduler.has_work and scheduler.kv_cache.num_used_blocks == 0
    window = None if None in windows else windows[0]
    for request in requests:
        whole = expected_output(request, request.max_tokens, window)
        if request.finish_reason is FinishReason.ABORT:
            assert request.request_id in aborted
            assert request.output_token_ids == whole[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == whole
