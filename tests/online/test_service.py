"""Prompt to text: stop strings, limits, rooms, seeds, time, drain."""

import asyncio
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferkit.core.messages import Abort
from inferkit.core.request import FinishReason
from inferkit.core.sampling_params import SamplingParams
from inferkit.online.errors import (
    BadRequest,
    GenerationFailed,
    RoomInUse,
    TimeOver,
    Unavailable,
)
from inferkit.online.service import Call
from tests.online.serving import MAX_MODEL_LEN, run, serving


def call(*prompts, n=1, is_streamed=True, room=None, kwargs=None, **sampling):
    sampling.setdefault("max_tokens", 8)
    return Call(
        prompts=list(prompts),
        sampling=SamplingParams(temperature=0.0, **sampling),
        n=n,
        room=room,
        is_streamed=is_streamed,
        template_kwargs=kwargs or {},
    )


async def text_of(generation):
    return "".join([piece.text async for piece in generation.pieces()])


def ids(served, text):
    return served.service.tokenizer.encode(text)


async def one(served, *args, **kwargs):
    (generation,) = await served.service.start(call(*args, **kwargs))
    return generation


def test_a_piece_per_token_and_the_reason_with_the_last():
    async def check():
        async with serving(tokens_per_output=3) as served:
            generation = await one(served, "abc", max_tokens=7)
            pieces = [piece async for piece in generation.pieces()]
            assert [piece.text for piece in pieces] == list("abcabca")
            assert [piece.finish_reason for piece in pieces] == [None] * 6 + ["length"]
            assert generation.text == "abcabca"
            assert generation.request.output_token_ids == ids(served, "abcabca")
            assert served.dispatcher.num_running == 0

    run(check())


def test_text_is_decoded_once_where_it_is_not_streamed():
    async def check():
        async with serving() as served:
            generation = await one(served, "abc", is_streamed=False)
            assert await text_of(generation) == ""
            assert generation.text == "abcabcab"

    run(check())


def test_a_token_without_text_is_a_piece_too():
    async def check():
        async with serving() as served:
            generation = await one(served, "\u4f60", max_tokens=4)
            texts = [piece.text async for piece in generation.pieces()]
            assert texts == ["", "", "\u4f60", "\ufffd"]

    run(check())


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("tokens_per_output", [1, 3])
def test_a_stop_string_cuts_the_text_and_frees_the_request(is_streamed, tokens_per_output):
    async def check():
        async with serving(tick_s=0.002, tokens_per_output=tokens_per_output) as served:
            generation = await one(
                served, "hello ", stop=("o h",), is_streamed=is_streamed, max_tokens=190
            )
            text = await text_of(generation)
            assert (text if is_streamed else generation.text) == "hell"
            assert generation.text == "hell"
            assert generation.request.finish_reason is FinishReason.STOP
            assert generation.request.output_token_ids == ids(served, "hello h")
            assert served.dispatcher.num_running == 0
            await served.until(lambda: not served.workers[0].running)
            assert any(isinstance(message, Abort) for message in served.workers[0].received)

    run(check())


def test_text_that_might_begin_a_stop_string_is_delivered_at_the_end():
    async def check():
        async with serving() as served:
            generation = await one(served, "abc", stop=("cax",), max_tokens=4)
            texts = [piece.text async for piece in generation.pieces()]
            assert texts == ["a", "b", "", "ca"]

    run(check())


def test_samples_differ_by_their_index_and_share_a_seed():
    async def check():
        async with serving(dp_size=2) as served:
            generations = await served.service.start(call("ab", [1, 2, 3], n=3))
            assert [generation.index for generation in generations] == list(range(6))
            await asyncio.gather(*map(text_of, generations))
            sent = served.generates()
            prompts = Counter(tuple(message.token_ids) for message in sent)
            assert prompts == {tuple(ids(served, "ab")): 3, (1, 2, 3): 3}
            for prompt in prompts:
                same = [m for m in sent if tuple(m.token_ids) == prompt]
                assert sorted(m.sample_index for m in same) == [0, 1, 2]
                assert len({m.seed for m in same}) == 1
            assert len({m.room for m in sent}) == 6 and 0 not in {m.room for m in sent}
            given_seed = await one(served, "ab", seed=17)
            await text_of(given_seed)
            assert 17 in {m.seed for m in served.generates()}

    run(check())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1] * MAX_MODEL_LEN]}, "it has 200 tokens; this model takes at most 199"),
        (
            {"prompts": [[1] * 190], "max_tokens": 11},
            r"max_tokens=11 does not fit.*allowed is <= 10",
        ),
        ({"prompts": [[1, 300]]}, r"token ids \[300\] are outside.*allowed is 0 to 299"),
        ({"prompts": [[1]], "stop_token_ids": (300,)}, r"stop_token_ids: token ids \[300\]"),
        ({"prompts": [[1]], "stop_token_ids": tuple(range(65))}, "65 entries; allowed are at most"),
        ({"prompts": [[1]], "repetition_penalty": 1e-30}, "repetition_penalty=1e-30 is out of"),
        ({"prompts": [[1]], "top_k": 2**63}, "top_k=9223372036854775808 is out of range"),
        ({"prompts": [[1]], "stop": ("x",) * 17}, "stop has 17 strings; allowed are at most 16"),
        ({"prompts": [[1]], "stop": ("x" * 513,)}, "stop has a string of 513 characters"),
        ({"prompts": [""]}, "prompt: the text is empty"),
        ({"prompts": ["ok", []]}, "prompt: the list is empty"),
        ({"prompts": [[1] * 60]}, "60 tokens do not fit"),
        (
            {"prompts": [[{"role": "user", "content": "x"}]], "kwargs": {"chat_template": "{{x}}"}},
            "chat_template_kwargs: chat_template cannot be set by a request",
        ),
    ],
)
def test_what_can_never_run_is_refused_at_once(arguments, message):
    async def check():
        async with serving() as served:
            prompts = arguments.pop("prompts")
            with pytest.raises(BadRequest, match=message):
                for generation in await served.service.start(call(*prompts, **arguments)):
                    await text_of(generation)
            assert served.dispatcher.num_running == 0
            assert not served.workers[0].running

    run(check())


@pytest.mark.parametrize(("default", "expected"), [(0, 197), (5, 5), (500, 197)])
def test_a_request_without_a_number_goes_to_the_default_or_the_end(default, expected):
    async def check():
        async with serving(default_max_tokens=default) as served:
            generation = await one(served, "abc", max_tokens=None)
            await text_of(generation)
            assert len(generation.request.output_token_ids) == expected

    run(check())


def test_variables_of_the_chat_template_arrive():
    async def check():
        async with serving() as served:
            tokenizer = served.service.tokenizer
            tokenizer.chat_template = "{{ messages[0]['content'] }}{% if loud %}!{% endif %}"
            messages = [{"role": "user", "content": "hi"}]
            for kwargs, text in (({"loud": True}, "hi!"), ({"loud": False}, "hi"), ({}, "hi")):
                generation = await one(served, messages, kwargs=kwargs, max_tokens=3)
                assert generation.request.prompt_token_ids == ids(served, text)
                await text_of(generation)

    run(check())


def test_a_room_of_the_clients_own_names_one_running_request():
    async def check():
        async with serving(tick_s=0.002) as served:
            generation = await one(served, "ab", room=77, max_tokens=100)
            assert generation.room == 77
            with pytest.raises(RoomInUse, match="bootstrap_room=77 belongs to a request"):
                await one(served, "ab", room=77)
            other = await one(served, "ab", room=78, max_tokens=1)
            await text_of(other)
            generation.cancel("enough")
            again = await one(served, "ab", room=77, max_tokens=1)
            await text_of(again)
            first, last = (m for m in served.generates() if m.room == 77)
            assert first.attempt != last.attempt

    run(check())


def test_abort_by_room_or_id_ends_with_what_is_there():
    async def check():
        async with serving(tick_s=0.005) as served:
            generation = await one(served, "ab", room=5, max_tokens=190)
            pieces = generation.pieces()
            assert (await anext(pieces)).text == "a"
            assert served.service.abort(room=6) == 0
            assert served.service.abort(room=5) == 1
            rest = [piece async for piece in pieces]
            assert rest[-1].finish_reason is FinishReason.ABORT
            assert generation.text.startswith("a")
            assert served.service.abort(room=5) == 0

    run(check())


def test_a_consumer_that_leaves_frees_its_request():
    async def check():
        async with serving(tick_s=0.002) as served:
            generation = await one(served, "ab", max_tokens=190)
            pieces = generation.pieces()
            await anext(pieces)
            await pieces.aclose()
            assert served.dispatcher.num_running == 0
            await served.until(lambda: not served.workers[0].running)

    run(check())


def test_time_that_is_over_ends_the_request():
    async def check():
        async with serving(timeout_s=0.1, tick_s=0.005) as served:
            generation = await one(served, "ab", max_tokens=190)
            with pytest.raises(TimeOver):
                await text_of(generation)
            await served.until(lambda: not served.workers[0].running)
            (message,) = served.generates()
            assert 5000 < message.remaining_ms <= 5100

    run(check())


def test_nothing_is_taken_before_the_probe_and_after_the_drain():
    async def check():
        async with serving(probes=False, dp_size=2, tick_s=0.002) as served:
            service = served.service
            assert service.state == "starting"
            with pytest.raises(Unavailable, match="not ready yet"):
                await one(served, "ab")
            await service.probe()
            assert service.state == "ready"
            received = [worker.received[0] for worker in served.workers]
            assert [m.sampling.max_tokens for m in received] == [1, 1]
            generation = await one(served, "ab", max_tokens=20)
            service.drain()
            assert service.state == "draining"
            with pytest.raises(Unavailable, match="shutting down"):
                await one(served, "ab")
            text, is_drained = await asyncio.gather(text_of(generation), service.drained(10))
            assert text == "ab" * 10 and is_drained

    run(check())


def test_a_drain_ends_at_its_limit():
    async def check():
        async with serving(tick_s=0.01) as served:
            generation = await one(served, "ab", max_tokens=190)
            served.service.drain()
            assert not await served.service.drained(0.05)
            generation.cancel("end of the test")

    run(check())


def test_a_failure_while_running_names_its_cause():
    async def check():
        async with serving(tick_s=0.005) as served:
            generation = await one(served, "ab", max_tokens=190)
            pieces = generation.pieces()
            await anext(pieces)
            served.dispatcher.fail(GenerationFailed("rank 0 was killed"))
            with pytest.raises(GenerationFailed, match="rank 0 was killed"):
                async for _ in pieces:
                    pass
            assert served.service.state == "failed"
            with pytest.raises(Unavailable, match="rank 0 was killed"):
                await one(served, "ab")

    run(check())


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompt=st.text(alphabet="ab\u00e9\u4f60\U0001f600 ", min_size=1, max_size=6),
    stop=st.lists(st.text(alphabet="ab\u4f60 ", min_size=1, max_size=3), max_size=2),
    max_tokens=st.integers(1, 30),
    chunk=st.integers(1, 4),
)
def test_streamed_text_is_the_text_of_the_whole(prompt, stop, max_tokens, chunk):
    async def check():
        async with serving(tokens_per_output=chunk) as served:
            texts = []
            for is_streamed in (True, False):
                generation = await one(
                    served, prompt, stop=tuple(stop), max_tokens=max_tokens, is_streamed=is_streamed
                )
                streamed = await text_of(generation)
                texts.append(streamed if is_streamed else generation.text)
                assert generation.request.finish_reason in ("stop", "length")
            assert texts[0] == texts[1]

    run(check())
