"""One line of generations.jsonl."""

import json
import pickle

from inferkit.core.request import FinishReason, TokenLogprobs
from inferkit.offline.result import GenerationResult
from tests.offline.finished_requests import make_request


def test_times_and_identity_come_from_the_request() -> None:
    request = make_request(4, sample_index=2, finish_detail="why")
    result = GenerationResult.from_request(request, "Hi", "text")
    assert (result.ttft_s, result.tpot_s, result.queue_s, result.e2e_s) == (2.0, 3.0, 1.0, 8.0)
    assert (result.request_id, result.seed, result.sample_index) == (4, 9, 2)
    assert (result.finish_reason, result.finish_detail) == ("length", "why")
    assert (result.prompt_token_ids, result.token_ids) == ([1, 2, 3, 4], [5, 6, 7])


def test_a_request_that_never_ran_has_no_times() -> None:
    request = make_request(
        output_token_ids=[],
        token_times_s=[],
        first_scheduled_time_s=None,
        finish_reason=FinishReason.REFUSED,
    )
    result = GenerationResult.from_request(request, "Hi", "")
    assert (result.ttft_s, result.tpot_s, result.queue_s) == (None, None, None)
    assert result.finish_reason == "refused"


def test_json_is_one_readable_line_of_finite_numbers() -> None:
    entry = TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top=((5, -0.5), (6, float("-inf"))))
    request = make_request(output_logprobs=[entry])
    messages = [{"role": "user", "content": "\u4f60\u597d\n\u2028"}]
    line = GenerationResult.from_request(request, messages, "a\nb").to_json()
    assert "\n" not in line
    assert "\u4f60\u597d" in line
    values = json.loads(line)
    assert values["prompt"] == messages
    assert values["text"] == "a\nb"
    assert values["logprobs"][0]["top"] == [[5, -0.5], [6, -9999.0]]
    assert request.output_logprobs == [entry]


def test_a_result_survives_a_pipe() -> None:
    result = GenerationResult.from_request(make_request(), "Hi", "text")
    assert pickle.loads(pickle.dumps(result)) == result
