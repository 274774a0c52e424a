"""Text, stop strings and results of requests in flight."""

from typing import Any

import pytest

from inferkit.core.request import FinishReason, Request, RequestState
from inferkit.core.sampling_params import SamplingParams
from inferkit.offline.output_processor import OutputProcessor
from tests.offline.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()


def make_request(request_id: int = 0, **sampling: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=TOKENIZER.encode("Hello"),
        sampling=SamplingParams(**sampling),
        seed=3,
    )


def feed(processor: OutputProcessor, request: Request, text: str) -> bool:
    """Deliver tokens one by one, as steps do, until a stop string is met."""
    for token_id in TOKENIZER.encode(text):
        request.output_token_ids.append(token_id)
        if processor.process(request.request_id, [token_id]):
            return True
    return False


def test_text_is_the_decoded_output_without_special_tokens() -> None:
    processor, request = OutputProcessor(TOKENIZER), make_request()
    processor.add(request, "Hello")
    assert not feed(processor, request, "<s> again \u4f60\u597d</s>")
    assert processor.text(request) == " again \u4f60\u597d"
    assert processor.text(request) == TOKENIZER.decode(
        request.output_token_ids, skip_special_tokens=True
    )


def test_a_stop_string_ends_the_text_and_keeps_its_token() -> None:
    processor, request = OutputProcessor(TOKENIZER), make_request(stop=("lazy", "dog"))
    processor.add(request, "Hello")
    assert feed(processor, request, "over the lazy dog")
    assert processor.text(request) == "over the "
    assert processor.stop_len(0) == len(request.output_token_ids)
    whole = TOKENIZER.decode(request.output_token_ids)
    assert "lazy" in whole and "dog" not in whole


def test_tokens_that_were_computed_after_the_stop_string_do_not_change_the_text() -> None:
    processor, request = OutputProcessor(TOKENIZER), make_request(stop=("abc", "b"))
    processor.add(request, "Hello")
    tokens = [TOKENIZER.convert_tokens_to_ids(c) for c in "abc"]
    request.output_token_ids = tokens
    assert processor.process(0, tokens)
    assert processor.stop_len(0) == 2
    # Of the whole output it would be "", since "abc" begins before "b".
    assert processor.text(request) == "a"


def test_requests_do_not_mix() -> None:
    processor = OutputProcessor(TOKENIZER)
    first, second = make_request(0, stop=("x",)), make_request(1, stop=("fox",))
    processor.add(first, "a")
    processor.add(second, "b")
    assert not feed(processor, first, "brown f")
    assert not feed(processor, second, "brown f")
    assert not processor.process(1, TOKENIZER.encode("o"))
    assert processor.process(0, TOKENIZER.encode("x"))
    assert processor.process(1, TOKENIZER.encode("x"))


def test_a_streamed_request_yields_its_text_in_deltas() -> None:
    processor, request = OutputProcessor(TOKENIZER), make_request()
    processor.add(request, "Hello", is_streamed=True)
    deltas = []
    for token_id in TOKENIZER.encode("\u4f60\u597d \U0001f600 ok"):
        request.output_token_ids.append(token_id)
        processor.process(0, [token_id])
        deltas.append(processor.delta(0))
    deltas.append(processor.finish(0))
    assert "".join(deltas) == processor.text(request) == "\u4f60\u597d \U0001f600 ok"
    assert "\ufffd" not in "".join(deltas)


def test_result_holds_what_the_request_went_through_and_is_forgotten() -> None:
    processor, request = OutputProcessor(TOKENIZER), make_request(stop=("lazy",))
    processor.add(request, "Hello")
    feed(processor, request, "the lazy")
    request.state, request.finish_reason = RequestState.FINISHED, FinishReason.STOP
    result = processor.result(request)
    assert (result.prompt, result.text, result.finish_reason) == ("Hello", "the ", "stop")
    assert result.token_ids == request.output_token_ids
    with pytest.raises(KeyError):
        processor.result(request)


def test_a_removed_request_is_unknown() -> None:
    processor, request = OutputProcessor(TOKENIZER), make_request(stop=("a",))
    processor.add(request, "Hello")
    processor.remove(0)
    assert not processor.process(0, TOKENIZER.encode("a"))
