"""The openai client against a running instance, unmodified."""

import asyncio

import pytest

from tests.e2e.serving import serve

openai = pytest.importorskip("openai")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # those of the client are its own business
]

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tiny_hf_model, tmp_path_factory):
    model = tiny_hf_model("llama", eos_token_id=None)
    with serve(tmp_path_factory.mktemp("serve"), model, "model.name=tiny") as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "inferkit")


def test_chat_whole_and_streamed_are_the_same_text(client):
    request = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_chat_with_samples_seed_logprobs_and_stop(client):
    request = {"model": "tiny", "messages": HELLO, "max_tokens": 10, "seed": 7, "n": 3}
    one, two = (client.chat.completions.create(**request) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices] and len(set(texts)) == 3
    scored = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    content = scored.choices[0].logprobs.content
    assert len(content) == 3 and all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    stop = texts[0][4:6]
    cut = client.chat.completions.create(**request | {"n": 1, "stop": [stop]})
    assert cut.choices[0].message.content == texts[0][: texts[0].index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_completions_of_text_and_of_token_ids(client):
    request = {"model": "tiny", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    answer = client.completions.create(prompt=["one", "two"], **request)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(len(choice.logprobs.token_logprobs) == 6 for choice in answer.choices)
    ids = client.completions.create(prompt=[[5, 6, 7]], **request)
    assert ids.usage.prompt_tokens == 3
    chunks = list(client.completions.create(prompt="one", stream=True, **request))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(openai.NotFoundError, match="is not served here; use 'tiny'"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="top_p=9.0 is out of range") as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, top_p=9.0)
    assert bad.value.param == "top_p" and bad.value.request_id
    with pytest.raises(openai.BadRequestError, match="allowed is <="):
        client.completions.create(model="tiny", prompt="x", max_tokens=5000)


def test_the_stream_helper(client):
    request = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "temperature": 0}
    text = client.chat.completions.create(**request).choices[0].message.content
    request["stop"] = [text[5:7]]  # the helper takes the length limit for an error
    with client.chat.completions.stream(**request) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    whole = client.chat.completions.create(**request)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_sixteen_at_once_have_ids_of_their_own(server):
    async def ask():
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)
        async with client:
            requests = [
                client.completions.create(
                    model="tiny", prompt=f"number {number}", max_tokens=8, temperature=0
                )
                for number in range(16)
            ]
            return await asyncio.gather(*requests)

    together = asyncio.run(ask())
    assert len({answer.id for answer in together}) == 16
    again = asyncio.run(ask())
    assert [a.choices[0].text for a in together] == [a.choices[0].text for a in again]


def test_a_stream_that_is_left_is_freed(server, client):
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait_until_idle()
