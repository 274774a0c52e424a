"""The HTTP interface, in the forms that clients read."""

import asyncio
import json

import pytest

from tests.online.serving import KV_TOTAL, MAX_MODEL_LEN, VOCAB_SIZE, run, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


async def post(served, path, **body):
    return await served.client.post(path, json=body)


async def events(served, path, **body):
    """Data of all events of a stream; the last one must be [DONE]."""
    response = await post(served, path, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == "" and all(block.startswith("data: ") for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def check(test, **options):
    async def work():
        async with serving(**options) as served:
            await test(served)

    run(work())


# -- /generate -----------------------------------------------------------------------------------


def test_generate_answers_with_text_ids_room_and_usage():
    async def test(served):
        response = await post(served, "/generate", prompt="abc", max_tokens=5, bootstrap_room=2**62)
        answer = response.json()
        assert response.status_code == 200
        assert answer["output"] == "abcab"
        assert answer["output_ids"] == served.service.tokenizer.encode("abcab")
        assert answer["bootstrap_room"] == str(2**62)
        assert answer["finish_reason"] == "length"
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        assert answer["request_id"] == response.headers["x-request-id"]
        assert "logprobs" not in answer
        (message,) = served.generates()
        assert message.sampling.is_greedy, "the configuration's defaults are /generate's"

    check(test)


@pytest.mark.parametrize(
    "prompt", [{"prompt": [64, 65]}, {"input_ids": [64, 65]}, {"text": "ab"}, {"prompt": "ab"}]
)
def test_generate_takes_text_or_token_ids(prompt):
    async def test(served):
        answer = (await post(served, "/generate", max_tokens=2, **prompt)).json()
        assert (answer["output"], answer["output_ids"]) == ("ab", [64, 65])

    check(test)


def test_generate_streams():
    async def test(served):
        options = {"include_usage": True}
        chunks = await events(
            served, "/generate", prompt="ab", max_tokens=3, stream_options=options, logprobs=1
        )
        *tokens, last = chunks
        assert [chunk["output"] for chunk in tokens] == ["a", "b", "a"]
        assert [chunk["output_ids"] for chunk in tokens] == [[64], [65], [64]]
        assert [chunk["finish_reason"] for chunk in tokens] == [None, None, "length"]
        assert tokens[0]["logprobs"] == [
            {"token_id": 64, "logprob": -0.5, "rank": 1, "top": [[64, -0.5]]}
        ]
        assert last["usage"]["completion_tokens"] == 3
        assert len({(chunk["request_id"], chunk["bootstrap_room"]) for chunk in chunks}) == 1

    check(test)


# -- OpenAI's forms ------------------------------------------------------------------------------


def test_models_are_listed_with_what_benchmarks_read():
    async def test(served):
        answer = (await served.client.get("/v1/models")).json()
        (entry,) = answer["data"]
        for name in ("echo", "models/echo"):
            assert (await served.client.get(f"/v1/models/{name}")).json() == entry
        assert (await served.client.get("/v1/models/other")).status_code == 404
        assert answer["object"] == "list" and isinstance(entry.pop("created"), int)
        assert entry == {
            "id": "echo",
            "object": "model",
            "owned_by": "inferkit",
            "root": "models/echo",
            "max_model_len": MAX_MODEL_LEN,
            "vocab_size": VOCAB_SIZE,
        }

    check(test)


def test_a_completion_has_the_fields_of_openai():
    async def test(served):
        answer = (await post(served, COMPLETIONS, model="echo", prompt="abc", max_tokens=4)).json()
        assert answer.pop("id").startswith("cmpl-") and isinstance(answer.pop("created"), int)
        assert answer == {
            "object": "text_completion",
            "model": "echo",
            "choices": [{"index": 0, "text": "abca", "finish_reason": "length", "logprobs": None}],
            "usage": {
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "total_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 1},
            },
        }
        (message,) = served.generates()
        assert message.sampling.temperature == 1.0

    check(test)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["aba"]),
        (["ab", "c"], ["aba", "ccc"]),
        ([64, 65], ["aba"]),
        ([[64, 65], [66]], ["aba", "ccc"]),
    ],
)
def test_prompts_of_completions(prompt, texts):
    async def test(served):
        answer = (await post(served, COMPLETIONS, prompt=prompt, max_tokens=3)).json()
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))

    check(test)


@pytest.mark.parametrize(("default", "count"), [(0, 16), (5, 5)])
def test_length_of_a_completion_without_a_number(default, count):
    async def test(served):
        answer = (await post(served, COMPLETIONS, prompt="ab")).json()
        assert answer["usage"]["completion_tokens"] == count

    check(test, default_max_tokens=default)


def test_logprobs_of_a_completion_are_finite():
    async def test(served):
        answer = (await post(served, COMPLETIONS, prompt="ab", max_tokens=2, logprobs=2)).json()
        assert answer["choices"][0]["logprobs"] == {
            "tokens": ["a", "b"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [{"a": -0.5, "b": -9999.0}, {"b": -0.5}],
            "text_offset": [0, 1],
        }
        chunks = await events(served, COMPLETIONS, prompt="ab", max_tokens=2, logprobs=0)
        logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [entry["tokens"] for entry in logprobs] == [["a"], ["b"]]
        assert [entry["text_offset"] for entry in logprobs] == [[0], [1]]

    check(test)


def test_a_chat_completion_has_the_fields_of_openai():
    async def test(served):
        answer = (
            await post(served, CHAT, model="echo", messages=HELLO, max_completion_tokens=4)
        ).json()
        assert answer.pop("id").startswith("chatcmpl-") and isinstance(answer.pop("created"), int)
        assert answer.pop("usage")["completion_tokens"] == 4
        assert answer == {
            "object": "chat.completion",
            "model": "echo",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "user"},
                    "finish_reason": "length",
                    "logprobs": None,
                }
            ],
        }
        (message,) = served.generates()
        text = served.service.tokenizer.decode(message.token_ids)
        assert text == "user: hello\nassistant: "

    check(test)


def test_a_chat_without_a_number_goes_to_the_end_of_the_context():
    async def test(served):
        answer = (await post(served, CHAT, messages=HELLO)).json()
        assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN

    check(test)


def test_content_may_be_a_list_of_text_parts():
    async def test(served):
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        messages = [{"role": "user", "content": parts}]
        response = await post(served, CHAT, messages=messages, max_tokens=1)
        assert response.status_code == 200
        (message,) = served.generates()
        text = served.service.tokenizer.decode(message.token_ids)
        assert text == "user: one\ntwo\nassistant: "

    check(test)


def test_logprobs_of_a_chat():
    async def test(served):
        answer = (
            await post(served, CHAT, messages=HELLO, max_tokens=1, logprobs=True, top_logprobs=2)
        ).json()
        assert answer["choices"][0]["logprobs"] == {
            "content": [
                {
                    "token": "u",
                    "logprob": -0.5,
                    "bytes": [117],
                    "top_logprobs": [
                        {"token": "u", "logprob": -0.5, "bytes": [117]},
                        {"token": "b", "logprob": -9999.0, "bytes": [98]},
                    ],
                }
            ]
        }

    check(test)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_one_chunk_per_token_with_what_every_client_needs(path):
    async def test(served):
        prompt = {"prompt": "user"} if path == COMPLETIONS else {"messages": HELLO}
        chunks = await events(served, path, model="echo", max_tokens=6, **prompt)
        kind = "text_completion" if path == COMPLETIONS else "chat.completion.chunk"
        assert {chunk["object"] for chunk in chunks} == {kind}
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        assert all("usage" not in chunk and chunk["model"] == "echo" for chunk in chunks)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["length"]
        assert {choice["index"] for choice in choices} == {0}
        if path == COMPLETIONS:
            assert [choice["text"] for choice in choices] == list("userus")
        else:
            assert [choice["delta"]["content"] for choice in choices] == list("user: ")
            assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * 5

    check(test, tokens_per_output=4)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_comes_only_where_it_is_asked_for(path):
    async def test(served):
        prompt = {"prompt": "ab"} if path == COMPLETIONS else {"messages": HELLO}
        request = {**prompt, "max_tokens": 3}
        for options in (None, {}, {"include_usage": False}):
            chunks = await events(served, path, stream_options=options, **request)
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
        chunks = await events(served, path, stream_options={"include_usage": True}, **request)
        assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, 0]
        assert ["usage" in chunk for chunk in chunks] == [False, False, False, True]
        assert chunks[-1]["usage"]["completion_tokens"] == 3
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await events(served, path, stream_options=options, **request)
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]

    check(test)


def test_several_samples_of_several_prompts_streamed_and_not():
    async def test(served):
        request = {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 4, "seed": 3}
        answer = (await post(served, COMPLETIONS, **request)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in answer["choices"]] == ["abab"] * 2 + ["xyzx"] * 2
        assert answer["usage"]["prompt_tokens"] == 5
        assert answer["usage"]["completion_tokens"] == 16
        texts = dict.fromkeys(range(4), "")
        for chunk in await events(served, COMPLETIONS, **request):
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
        assert list(texts.values()) == ["abab"] * 2 + ["xyzx"] * 2
        sent = [(m.seed, m.sample_index) for m in served.generates()]
        assert sorted(sent) == sorted([(3, 0), (3, 1)] * 4)

    check(test, dp_size=2)


@pytest.mark.parametrize("stop", ["bc", ["q", "bc"]])
def test_stop_strings(stop):
    async def test(served):
        request = {"prompt": "abc", "max_tokens": 50, "stop": stop}
        answer = (await post(served, COMPLETIONS, **request)).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
        chunks = await events(served, COMPLETIONS, **request)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    check(test)


def test_null_is_absent_and_unknown_fields_are_ignored():
    async def test(served):
        sampling = ["top_p", "top_k", "seed", "min_tokens", "stop_token_ids", "ignore_eos"]
        penalties = ["presence_penalty", "frequency_penalty", "repetition_penalty"]
        others = ["stop", "n", "best_of", "stream", "stream_options", "logprobs", "model"]
        others += ["echo", "suffix", "bootstrap_room"]
        nothing = dict.fromkeys(sampling + penalties + others)
        response = await post(
            served, COMPLETIONS, prompt="ab", max_tokens=2, lora_path="x", user="me", **nothing
        )
        assert response.status_code == 200, response.text

    check(test)


def test_all_sampling_fields_arrive():
    async def test(served):
        fields = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "min_tokens": 2,
            "max_tokens": 3,
            "stop_token_ids": [5],
            "ignore_eos": True,
            "seed": 2**63 - 1,
        }
        response = await post(served, COMPLETIONS, prompt="ab", stop=["zz"], best_of=1, **fields)
        assert response.status_code == 200, response.text
        (message,) = served.generates()
        for name, value in fields.items():
            found = getattr(message.sampling, name)
            assert found == (tuple(value) if isinstance(value, list) else value), name
        assert message.sampling.stop == ("zz",) and message.seed == 2**63 - 1

    check(test)


def test_the_interface_describes_itself():
    async def test(served):
        response = await served.client.get("/openapi.json")
        assert response.status_code == 200
        assert {"/generate", CHAT, COMPLETIONS, "/ready"} <= response.json()["paths"].keys()

    check(test)


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "is out of range"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature", "valid number"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "allowed is >= 1"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "valid integer"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens", "a number is needed"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 200}, "max_tokens", "allowed is <= 199"),
        (COMPLETIONS, {"prompt": "a", "seed": -1}, "seed", "is out of range"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed", "is out of range"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "is out of range"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "allowed is 1 to 128"),
        (COMPLETIONS, {"prompt": "a", "n": 129}, "n", "allowed is 1 to 128"),
        (COMPLETIONS, {"prompt": ["a"] * 9, "n": 114}, "prompt", "allowed are 1024 generations"),
        (COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 3}, "best_of", "is not supported"),
        (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop", "must hold non-empty strings"),
        (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop", "valid string"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo", "is not supported"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "the text is empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "the list is empty"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "the list is empty"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "int found"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "'a' found"),
        (COMPLETIONS, {"prompt": [300]}, "prompt", "outside the model's vocabulary"),
        (COMPLETIONS, {"prompt": HELLO}, "prompt", "they go to /v1/chat/completions"),
        (COMPLETIONS, {"prompt": "a" * 200}, "prompt", "takes at most 199"),
        (COMPLETIONS, {"prompt": "a" * (KV_TOTAL + 1)}, "prompt", "51 tokens do not fit"),
        (COMPLETIONS, {}, "prompt", "it is missing"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt", "surrogate"),
        (CHAT, {"messages": []}, "messages", "missing or empty"),
        (CHAT, {}, "messages", "missing or empty"),
        (CHAT, {"messages": ["x"]}, "messages", "message 0 is no object"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages", "needs a string `role`"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "part of type 'image_url'",
        ),
        (CHAT, {"messages": HELLO, "tools": [{}]}, "tools", "not supported"),
        (
            CHAT,
            {"messages": HELLO, "response_format": {"type": "json_object"}},
            "response_format",
            "is not supported",
        ),
        (CHAT, {"messages": HELLO, "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ("/generate", {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ("/generate", {"prompt": "a" * 10**6}, "prompt", "1000000 characters are more than"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ("/generate", {}, "prompt", "given are none of them"),
        ("/generate", {"prompt": "a", "text": "b"}, "prompt", "given are prompt, text"),
        ("/generate", {"prompt": "a", "n": 2}, "n", "use /v1/completions"),
        ("/generate", {"prompt": "a", "bootstrap_room": 0}, "bootstrap_room", "out of range"),
        ("/generate", {"prompt": "a", "bootstrap_room": 2**63}, "bootstrap_room", "out of range"),
        ("/generate", {"prompt": "a", "bootstrap_room": "x"}, "bootstrap_room", "is no number"),
        (COMPLETIONS, {"prompt": "a", "n": 2, "bootstrap_room": 7}, "bootstrap_room", "names one"),
        ("/abort", {}, "request_id", "it is missing"),
        ("/abort", {"request_id": 5}, "request_id", "is no text"),
        ("/abort", [1], "request_id", "must be a JSON object"),
    ],
)
def test_a_bad_request_names_its_field(path, body, param, words):
    async def test(served):
        response = await served.client.post(path, content=json.dumps(body), headers=JSON)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"] and error["type"] == "invalid_request_error"
        assert served.dispatcher.num_running == 0
        streamed = json.dumps({**body, "stream": True} if isinstance(body, dict) else body)
        again = await served.client.post(path, content=streamed, headers=JSON)
        assert again.status_code == 400, "a stream is refused before it begins"

    check(test)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "headers", "words"),
    [
        (b"{", JSON, "the body is no JSON"),
        (b"", JSON, "must be a JSON object"),
        (b"[1]", JSON, "must be a JSON object"),
        (b'{"prompt": "a"}', {"content-type": "text/plain"}, "sent as application/json"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", JSON, ""),
        (b"[" * 100_000, JSON, ""),
        (b"\xff\xfe", JSON, ""),
    ],
)
def test_a_body_that_is_no_request(content, headers, words):
    async def test(served):
        response = await served.client.post(COMPLETIONS, content=content, headers=headers)
        assert response.status_code == 400, response.text
        assert words in response.json()["error"]["message"]
        assert (await served.client.get("/health")).status_code == 200

    check(test)


def test_an_unknown_model_is_404_and_names_the_one_that_is_there():
    async def test(served):
        response = await post(served, COMPLETIONS, model="gpt", prompt="a")
        assert response.status_code == 404
        assert response.json() == {
            "error": {
                "message": "model='gpt' is not served here; use 'echo'",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
        }
        for known in ("echo", "models/echo", None, ""):
            answer = await post(served, COMPLETIONS, model=known, prompt="a", max_tokens=1)
            assert answer.status_code == 200

    check(test)


def test_other_paths_and_methods_have_error_bodies_too():
    async def test(served):
        for response, status in (
            (await served.client.get("/nowhere"), 404),
            (await served.client.get(COMPLETIONS), 405),
        ):
            assert response.status_code == status
            assert "message" in response.json()["error"]

    check(test)


def test_a_body_beyond_every_context_is_refused_while_it_comes(monkeypatch):
    monkeypatch.setattr("inferkit.online.middleware.MAX_BODY_BYTES", 1000)

    async def test(served):
        response = await post(served, COMPLETIONS, prompt="a" * 1000)
        assert response.status_code == 413
        assert "longer than 1000 bytes" in response.json()["error"]["message"]

    check(test)


# -- identity, state, abort ----------------------------------------------------------------------


def test_the_clients_id_of_a_request_comes_back():
    async def test(served):
        headers = {"x-request-id": "trace-7", "authorization": "Bearer "}
        body = {"prompt": "a", "max_tokens": 1}
        response = await served.client.post(COMPLETIONS, json=body, headers=headers)
        assert response.headers["x-request-id"] == "trace-7"
        assert response.json()["id"] == "cmpl-trace-7"
        assert served.generates()[0].request_id == "trace-7"
        for bad in ("a" * 129, "a b"):
            response = await served.client.get("/health", headers={"x-request-id": bad})
            assert response.headers["x-request-id"] != bad

    check(test)


def test_live_and_ready_are_two_things():
    async def test(served):
        for method in ("GET", "HEAD"):
            assert (await served.client.request(method, "/health")).status_code == 200
            assert (await served.client.request(method, "/ready")).status_code == 503
        response = await post(served, COMPLETIONS, prompt="a")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        await served.service.probe()
        assert (await served.client.get("/ready")).json() == {"status": "ready"}
        assert (await post(served, COMPLETIONS, prompt="a")).status_code == 200
        served.service.drain()
        assert (await served.client.get("/ready")).status_code == 503
        assert (await served.client.get("/health")).status_code == 200
        response = await post(served, COMPLETIONS, prompt="a")
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]

    check(test, probes=False)


def test_stats_tell_what_runs_and_what_the_cache_holds():
    async def test(served):
        task = asyncio.create_task(post(served, COMPLETIONS, prompt="ab", max_tokens=190))
        await served.until(lambda: bool(served.workers[0].running))
        async with asyncio.timeout(10):
            while True:
                stats = (await served.client.get("/stats")).json()
                if stats["dp_ranks"][0]["kv_used"]:
                    break
        assert stats["role"] == "serve" and stats["status"] == "ready"
        assert stats["requests"] == {"running": 1, "started": 1}
        (rank,) = stats["dp_ranks"]
        assert rank["num_running"] == 1 and rank["kv_total"] == KV_TOTAL
        await task
        async with asyncio.timeout(10):
            while (await served.client.get("/stats")).json()["dp_ranks"][0]["kv_used"]:
                await asyncio.sleep(0.01)

    check(test, tick_s=0.01)


@pytest.mark.parametrize("how", ["request_id", "id", "bootstrap_room"])
def test_abort_ends_a_request_with_what_it_has(how):
    async def test(served):
        headers = {"x-request-id": "mine"}
        body = {"prompt": "ab", "max_tokens": 190, "bootstrap_room": 9}
        running = asyncio.create_task(served.client.post(COMPLETIONS, json=body, headers=headers))
        await served.until(lambda: bool(served.workers[0].running))
        target = {
            "request_id": {"request_id": "mine"},
            "id": {"request_id": "cmpl-mine"},
            "bootstrap_room": {"bootstrap_room": "9"},
        }[how]
        assert (await post(served, "/abort", request_id="other")).json() == {"aborted": 0}
        assert (await post(served, "/abort", **target)).json() == {"aborted": 1}
        answer = (await running).json()
        assert answer["choices"][0]["finish_reason"] == "abort"
        await served.until(lambda: not served.workers[0].running)
        assert (await post(served, "/abort", **target)).json() == {"aborted": 0}

    check(test, tick_s=0.005)


def test_a_room_that_is_in_use_is_409():
    async def test(served):
        body = {"prompt": "ab", "max_tokens": 100, "bootstrap_room": 9}
        running = asyncio.create_task(post(served, "/generate", **body))
        await served.until(lambda: bool(served.workers[0].running))
        response = await post(served, "/generate", **body)
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "room_in_use"
        assert (await running).status_code == 200
        assert (await post(served, "/generate", **body)).status_code == 200

    check(test, tick_s=0.002)


def test_sixteen_at_once_never_carry_each_others_words():
    async def test(served):
        words = [f"word{number:02d} " for number in range(16)]

        async def one(word, stream):
            body = {"prompt": word, "max_tokens": 3 * len(word)}
            if not stream:
                return (await post(served, COMPLETIONS, **body)).json()["choices"][0]["text"]
            chunks = await events(served, COMPLETIONS, **body)
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        tasks = [one(word, number % 2) for number, word in enumerate(words)]
        assert await asyncio.gather(*tasks) == [3 * word for word in words]

    check(test, dp_size=2)
