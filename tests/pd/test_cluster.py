"""`+role=cluster` in real processes: clients see what one instance would answer, and nothing stays
held. One deployment for all tests of this module; those at its end take it apart.
"""

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from inferkit import OfflineInference, SamplingParams, load_config
from tests.pd.deployments import assert_ended, cluster, generate_all

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

NUM_REQUESTS = 16
MAX_TOKENS = 24
PROMPTS = [
    [10 + (i * 37 + j * j * 11) % 240 for j in range(5 + 13 * (i % 6))] for i in range(NUM_REQUESTS)
]
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
LONG = {"prompt": [7, 8, 9], "max_tokens": 600, "ignore_eos": True, "temperature": 0.0}
EOS = 2
WORDS = [
    "model=llama",
    "model.dtype=float32",
    "kv_cache.block_size=16",
    "kv_cache.num_blocks=128",
    "engine.warm_up=false",
]


@pytest.fixture(scope="module")
def model(tiny_hf_model):
    return tiny_hf_model("llama")


@pytest.fixture(scope="module")
def offline(model):
    """`offline(prompts, **sampling)` returns the token ids of an offline run."""
    words = [*WORDS[:3], f"model.path={model}", "data.input_truncated_len=96"]
    llm = OfflineInference(load_config(words))

    def generate(prompts, **sampling):
        return [result.token_ids for result in llm.generate(prompts, SamplingParams(**sampling))]

    return generate


@pytest.fixture(scope="module")
def service(model, tmp_path_factory):
    words = [*WORDS, f"model.path={model}", "cluster.prefill=2"]
    with cluster(tmp_path_factory.mktemp("cluster"), *words) as deployment:
        yield deployment


def test_sixteen_requests_at_once_have_the_tokens_of_an_offline_run(service, offline):
    expected = offline(PROMPTS, **GREEDY)
    bodies = [{"prompt": prompt, **GREEDY} for prompt in PROMPTS]
    for _ in range(2):  # the second time from the prefix cache
        answers = generate_all(service.router, bodies, NUM_REQUESTS)
        assert [answer["output_ids"] for answer in answers] == expected
        assert {answer["finish_reason"] for answer in answers} == {"length"}
        service.wait_until_idle()
    assert len({answer["bootstrap_room"] for answer in answers}) == NUM_REQUESTS
    stats = service.router.stats()
    assert stats["retries"] == 0 and stats["ignored_outputs"] == 0
    # Prefill has not decoded and decode has not computed prompts.
    assert all(rank["num_steps"] > 0 for s in service.stats("prefill") for rank in s["dp_ranks"])


def test_an_answer_says_which_request_it_is_of(service):
    text = "What is a token?"
    answer = service.router.generate(text, **GREEDY)
    room = 2**62 + 3
    ids = list(text.encode())
    again = service.router.client.post(
        "/generate",
        json={"input_ids": [3 + b for b in ids], **GREEDY, "bootstrap_room": room},
        headers={"x-request-id": "mine"},
    ).json()
    assert again["request_id"] == "mine" and again["bootstrap_room"] == str(room)
    assert isinstance(answer["bootstrap_room"], str) and 1 <= int(answer["bootstrap_room"]) < 2**63
    assert answer["request_id"] not in ("", "mine")
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == len(answer["output_ids"]) == MAX_TOKENS
    chunks = list(service.router.stream("/generate", prompt=text, **GREEDY, bootstrap_room=room))
    assert {chunk["bootstrap_room"] for chunk in chunks} == {str(room)}
    assert "".join(chunk["output"] for chunk in chunks) == answer["output"]


def test_what_ends_with_the_first_token(service, offline):
    prompts = [[3 + (i * 7 + j * i * 31) % 250 for j in range(4)] for i in range(1500)]
    firsts = offline(prompts, temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = prompts[firsts.index([EOS])]
    greedy = {"temperature": 0.0, "max_tokens": 20}
    answer = service.router.generate(prompt, **greedy)
    assert (answer["output_ids"], answer["finish_reason"]) == ([EOS], "stop")
    assert answer["output"] == ""
    first = offline([PROMPTS[0]], **GREEDY)[0][0]
    answer = service.router.generate(PROMPTS[0], **greedy, stop_token_ids=[first])
    assert (answer["output_ids"], answer["finish_reason"]) == ([first], "stop")
    for streamed in (False, True):
        body = {"prompt": PROMPTS[0], "temperature": 0.0, "max_tokens": 1, "ignore_eos": True}
        (answer,) = (
            service.router.stream("/generate", **body)
            if streamed
            else [service.router.generate(**body)]
        )
        assert (answer["output_ids"], answer["finish_reason"]) == ([first], "length")
    service.wait_until_idle()


def test_a_stop_string_cuts_the_text_and_frees_the_request(service):
    text = service.router.generate("hello", **GREEDY | {"max_tokens": 40})["output"]
    stop = text[10:13]
    cut = text[: text.index(stop)]
    body = GREEDY | {"max_tokens": 1000, "stop": stop}
    answer = service.router.generate("hello", **body)
    assert (answer["output"], answer["finish_reason"]) == (cut, "stop")
    chunks = list(service.router.stream("/generate", prompt="hello", **body))
    assert "".join(chunk["output"] for chunk in chunks) == cut
    service.wait_until_idle()


def test_seeds_repeat_and_samples_differ(service, offline):
    sampling = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    expected = offline([PROMPTS[1]], **sampling, seed=9)[0]
    for _ in range(2):
        assert service.router.generate(PROMPTS[1], **sampling, seed=9)["output_ids"] == expected
    drawn = service.router.generate(PROMPTS[1], **sampling)
    again = service.router.generate(PROMPTS[1], **sampling, seed=drawn["seed"])
    assert drawn["output_ids"] == again["output_ids"] != expected
    body = {"prompt": PROMPTS[1], "n": 2, "seed": 9, "max_tokens": 12}
    answer = service.router.post("/v1/completions", **body).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 2 and answer["usage"]["completion_tokens"] > 2
    streamed = ["", ""]
    for chunk in service.router.stream("/v1/completions", **body):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts


def test_a_room_belongs_to_one_request_at_a_time(service):
    room = 2**63 - 1
    chunks = service.router.stream("/generate", **LONG, bootstrap_room=room)
    next(chunks)
    response = service.router.post("/generate", **LONG, bootstrap_room=str(room))
    assert response.status_code == 409 and str(room) in response.json()["error"]["message"]
    assert service.router.post("/abort", bootstrap_room=str(room)).json() == {"aborted": 1}
    assert list(chunks)[-1]["finish_reason"] == "abort"
    service.wait_until_idle()
    body = LONG | {"max_tokens": 2, "bootstrap_room": room}
    assert service.router.generate(**body)["finish_reason"] == "length"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_both_sides(service, streamed):
    clients = [service.router.open(**LONG, stream=streamed) for _ in range(3)]
    service.until(lambda: service.num_running("decode") == 3)
    for client in clients:
        client.close()
    start_s = time.monotonic()
    service.wait_until_idle()
    assert time.monotonic() - start_s < 10
    assert service.router.generate(**LONG | {"max_tokens": 3})["finish_reason"] == "length"


def test_clients_that_leave_at_once_are_forgotten(service):
    rng = random.Random(1)
    for number in range(20):
        client = service.router.open(**LONG | {"prompt": [9 + number] * 100}, stream=True)
        time.sleep(rng.uniform(0, 0.03))
        client.close()
    service.wait_until_idle()


def test_what_never_fits_is_refused_while_others_run(service):
    chunks = service.router.stream("/generate", **LONG)
    next(chunks)
    for body, number in (
        ({"prompt": [5] * 2048}, "2048"),
        ({"prompt": [5] * 2000, "max_tokens": 49}, "2048"),
        # Within the context of the model, but not within the blocks of decode.
        ({"prompt": [5] * 2000, "max_tokens": 48}, "127"),
    ):
        start_s = time.monotonic()
        response = service.router.post("/generate", **body)
        assert response.status_code == 400, response.text
        assert number in response.json()["error"]["message"]
        assert time.monotonic() - start_s < 5
    assert len(list(chunks)) == LONG["max_tokens"] - 1
    service.wait_until_idle()


def test_chat_completions_are_those_of_one_instance(service):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    whole = service.router.post("/v1/chat/completions", **body).json()
    chunks = list(service.router.stream("/v1/chat/completions", **body))
    counts = [answer["usage"]["total_tokens"] for answer in (whole, chunks[-1])]
    assert counts[0] == counts[1] > 8
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]


def test_a_killed_prefill_rank_costs_nobody_an_answer_that_has_not_begun(service, offline):
    """Requests that wait for it are computed by the other prefill instance."""
    expected = offline(PROMPTS[:8], **GREEDY)
    before = {entry["instance_id"] for entry in service.instances("prefill")}
    (rank,) = service.ranks("prefill", 0)
    rank.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(service.router.post, "/generate", prompt=p, **GREEDY) for p in PROMPTS[:8]
        ]
        service.until(lambda: 0 < service.router.stats()["requests"]["running"] < 8)
        rank.kill()
        start_s = time.monotonic()
        answers = [future.result().json() for future in futures]
    assert time.monotonic() - start_s < 30
    assert [answer.get("output_ids", answer) for answer in answers] == expected
    assert service.router.stats()["retries"] > 0
    # The cluster starts it again, with a new life at another port.
    service.until(
        lambda: (
            len(service.instances("prefill")) == 2
            and {entry["instance_id"] for entry in service.instances("prefill")} != before
        ),
        240,
    )
    service.wait_until_idle()


def test_a_killed_decode_rank_ends_its_requests_and_service_comes_back(service, offline):
    expected = offline(PROMPTS[:4], **GREEDY)
    chunks = service.router.stream("/generate", **LONG)
    next(chunks)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(service.router.post, "/generate", **LONG)
        service.until(lambda: service.num_running("decode") == 2)
        (rank,) = service.ranks("decode")
        rank.kill()
        start_s = time.monotonic()
        with pytest.raises(httpx.RemoteProtocolError):
            # An error event, and a body without an end.
            for chunk in chunks:
                last = chunk
        answer = whole.result()
    assert time.monotonic() - start_s < 30
    assert "decode" in last["error"]["message"]
    assert answer.status_code in (500, 503), answer.text
    service.wait_until_served()
    bodies = [{"prompt": prompt, **GREEDY} for prompt in PROMPTS[:4]]
    answers = generate_all(service.router, bodies, 4)
    assert [answer["output_ids"] for answer in answers] == expected
    service.wait_until_idle()


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones(service):
    """Ends the deployment of this module: keep this test the last one that uses it."""
    family = service.command.family()
    chunks = service.router.stream("/generate", **LONG)
    count = sum(1 for _ in zip(range(3), chunks, strict=False))
    service.command.terminate()
    is_refused = False
    for chunk in chunks:
        count += 1
        last = chunk
        if not is_refused and service.router.client.get("/ready").status_code == 503:
            response = service.router.post("/generate", **LONG)
            assert response.status_code == 503
            assert "shutting down" in response.json()["error"]["message"]
            is_refused = True
    assert is_refused
    assert count == LONG["max_tokens"] and last["finish_reason"] == "length"
    assert service.command.wait() == 0, service.command.logs()
    assert_ended(family)
    assert "Traceback" not in service.command.logs()
