"""A request's tokens, and its way through JSON."""

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferkit.core.request import FinishReason, Request, RequestState, TokenLogprobs
from inferkit.core.sampling_params import MAX_SEED, SamplingParams


def make_request() -> Request:
    """No field has its default, so that one that gets lost is seen."""
    return Request(
        request_id=7,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(
            temperature=0.5, stop=("a", "\u4f60"), stop_token_ids=(4,), logprobs=2, seed=MAX_SEED
        ),
        seed=MAX_SEED,
        sample_index=1,
        max_tokens=9,
        output_token_ids=[4, 5],
        output_logprobs=[
            TokenLogprobs(token_id=4, logprob=-0.1, rank=1, top=((4, -0.1), (9, -2.5))),
            TokenLogprobs(token_id=5, logprob=-3.0, rank=8, top=()),
        ],
        num_computed_tokens=4,
        num_cached_tokens=2,
        num_decode_steps=1,
        num_preemptions=1,
        num_skips=2,
        state=RequestState.RUNNING,
        finish_reason=FinishReason.STOP,
        finish_detail="why",
        valid_output_len=2,
        arrival_time_s=1.5,
        first_scheduled_time_s=2.0,
        token_times_s=[2.5, 3.0],
        finish_time_s=3.5,
    )


def through_json(request: Request) -> Request:
    return Request.from_dict(json.loads(json.dumps(request.to_dict())))


def test_a_running_request_goes_on_from_json_without_its_kv() -> None:
    request = make_request()
    again = through_json(request)
    assert (again.state, again.num_computed_tokens) == (RequestState.WAITING, 0)
    kept = {field.name for field in fields(Request)} - {"state", "num_computed_tokens"}
    assert {n: getattr(again, n) for n in kept} == {n: getattr(request, n) for n in kept}
    assert isinstance(again.finish_reason, FinishReason)
    assert again.output_logprobs[0].top == ((4, -0.1), (9, -2.5))


def test_a_finished_request_stays_finished() -> None:
    request = make_request()
    request.state = RequestState.FINISHED
    again = through_json(request)
    assert again.is_finished
    assert again.to_dict() == request.to_dict()


def test_a_fresh_request_survives_json() -> None:
    request = Request(request_id=0, prompt_token_ids=[1], sampling=SamplingParams(), seed=0)
    assert through_json(request).to_dict() == request.to_dict()


def test_the_written_state_does_not_share_lists_with_the_request() -> None:
    request = make_request()
    written = request.to_dict()
    request.output_token_ids.append(6)
    assert written["output_token_ids"] == [4, 5]


def test_requests_are_equal_only_to_themselves() -> None:
    request = make_request()
    assert request != make_request()
    assert request in [request]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 5, [1, 2, 3, 4, 5]), (0, 3, [1, 2, 3]), (2, 4, [3, 4]), (3, 5, [4, 5]), (4, 4, [])],
)
def test_token_ids_run_over_prompt_and_output(start: int, end: int, expected: list[int]) -> None:
    assert make_request().token_ids(start, end) == expected


@given(num_prompt=st.integers(0, 6), num_output=st.integers(0, 6), data=st.data())
def test_token_ids_equal_a_slice_of_the_whole(
    num_prompt: int, num_output: int, data: st.DataObject
) -> None:
    request = Request(
        request_id=0,
        prompt_token_ids=list(range(num_prompt)),
        output_token_ids=list(range(100, 100 + num_output)),
        sampling=SamplingParams(),
        seed=0,
    )
    end = data.draw(st.integers(0, num_prompt + num_output))
    start = data.draw(st.integers(0, end))
    whole = request.prompt_token_ids + request.output_token_ids
    assert request.token_ids(start, end) == whole[start:end]
    assert request.num_tokens == len(whole)
