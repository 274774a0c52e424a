"""`+role=serve` in real processes: the same tokens as offline, and bounded time at every fault."""

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import zmq

from inferkit import OfflineInference, SamplingParams, load_config
from tests.e2e.serving import serve

NUM_REQUESTS = 16
MAX_TOKENS = 24
PROMPTS = [
    [10 + (i * 37 + j * j * 11) % 240 for j in range(5 + 13 * (i % 6))] for i in range(NUM_REQUESTS)
]
LONG = {"prompt": [7, 8, 9], "max_tokens": 1900, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def model(tiny_hf_model):
    return tiny_hf_model("llama", eos_token_id=None)


def offline_generator(option, model):
    """`generate(prompts, **sampling)` returns the token ids of an offline run."""
    overrides = [f"model={option}", f"model.path={model}", "model.dtype=float32"]
    overrides += ["kv_cache.block_size=16", "data.input_truncated_len=96"]
    llm = OfflineInference(load_config(overrides))

    def generate(prompts, **sampling):
        return [result.token_ids for result in llm.generate(prompts, SamplingParams(**sampling))]

    return generate


@pytest.fixture(scope="module")
def offline(model):
    return offline_generator("llama", model)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("serve")
    with serve(directory, model, "kv_cache.block_size=16") as server:
        yield server


def generate(server, prompt, **body):
    body = {"max_tokens": MAX_TOKENS, "ignore_eos": True, **body}
    response = server.post("/generate", prompt=prompt, **body)
    assert response.status_code == 200, response.text
    return response.json()


def check_equal_to_offline(server, offline):
    expected = offline(PROMPTS, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for _ in range(2):  # the second time from the prefix cache
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            answers = list(pool.map(lambda prompt: generate(server, prompt), PROMPTS))
        assert [answer["output_ids"] for answer in answers] == expected
        assert {answer["finish_reason"] for answer in answers} == {"length"}
        server.wait_until_idle()
    cached = sum(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers)
    assert cached > 0


def test_sixteen_requests_at_once_have_the_tokens_of_an_offline_run(server, offline):
    check_equal_to_offline(server, offline)


def test_streamed_text_is_the_whole_text(server):
    for body in (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "n": 2},
        {"temperature": 0.0, "stop": ["~", "a", "="]},
    ):
        request = {"prompt": "The quick brown fox", "max_tokens": 40, **body}
        whole = server.post("/v1/completions", **request).json()
        texts = {choice["index"]: "" for choice in whole["choices"]}
        reasons = {}
        for chunk in server.stream("/v1/completions", **request):
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
        assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
        assert reasons == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}


def test_a_stop_string_cuts_the_text_and_frees_the_request(server):
    text = generate(server, "hello", max_tokens=40)["output"]
    stop = text[10:13]
    cut = text[: text.index(stop)]
    answer = generate(server, "hello", max_tokens=1000, stop=stop)
    assert (answer["output"], answer["finish_reason"]) == (cut, "stop")
    assert answer["usage"]["completion_tokens"] < 60
    server.wait_until_idle()


def test_seeds_repeat_and_samples_differ(server, offline):
    sampling = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    one, two = (generate(server, PROMPTS[0], **sampling, seed=9)["output_ids"] for _ in range(2))
    assert one == two == offline([PROMPTS[0]], **sampling, seed=9)[0]
    assert generate(server, PROMPTS[0], **sampling, seed=10)["output_ids"] != one
    drawn = generate(server, PROMPTS[0], **sampling)
    again = generate(server, PROMPTS[0], **sampling, seed=drawn["seed"])
    assert drawn["output_ids"] == again["output_ids"]
    answer = server.post("/v1/completions", prompt=PROMPTS[0], n=3, seed=9, max_tokens=12).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_blocks(server, streamed):
    body = json.dumps(LONG | {"stream": streamed}).encode()
    lines = ["POST /generate HTTP/1.1", "Host: x", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    address = httpx.URL(server.url)
    clients = [socket.create_connection((address.host, address.port)) for _ in range(3)]
    for client in clients:
        client.sendall(head.encode() + body)
    server.until(lambda: server.stats()["dp_ranks"][0]["num_running"] == 3)
    assert server.stats()["dp_ranks"][0]["kv_used"] > 0
    for client in clients:
        client.close()
    start_s = time.monotonic()
    server.wait_until_idle()
    assert time.monotonic() - start_s < 5


def test_abort_frees_a_running_request(server):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.post, "/generate", **LONG, bootstrap_room=2**62)
        server.until(lambda: server.stats()["dp_ranks"][0]["num_running"] == 1)
        assert server.post("/abort", bootstrap_room=str(2**62)).json() == {"aborted": 1}
        answer = future.result().json()
    assert answer["finish_reason"] == "abort" and len(answer["output_ids"]) < 1900
    server.wait_until_idle()


def test_what_never_fits_is_refused_while_others_run(server):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.post, "/generate", **LONG | {"max_tokens": 300})
        server.until(lambda: server.stats()["dp_ranks"][0]["num_running"] == 1)
        for body in ({"prompt": [5] * 2048}, {"prompt": [5] * 2000, "max_tokens": 49}):
            response = server.post("/v1/completions", **body)
            assert response.status_code == 400
            assert "2048" in response.json()["error"]["message"]
        assert future.result().json()["usage"]["completion_tokens"] == 300


def test_strangers_on_the_sockets_of_the_workers_change_nothing(server):
    urls = json.loads((server.directory / "run" / "provenance.json").read_text())["zmq_urls"]
    with zmq.Context() as context:
        for url in urls:
            host, port = url.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(os.urandom(2000))
            for kind in (zmq.DEALER, zmq.PUSH):
                with context.socket(kind) as stranger:
                    stranger.linger = 200
                    stranger.connect(url)
                    for size in (0, 1, 50, 5000):
                        stranger.send_multipart([os.urandom(size), b"", os.urandom(9)])
    before = generate(server, PROMPTS[1])
    server.until(lambda: server.stats()["dropped_messages"].get("malformed", 0) > 0)
    assert generate(server, PROMPTS[1])["output_ids"] == before["output_ids"]


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones(server):
    """Ends the server of this module: keep this test the last one that uses it."""
    chunks, refusals = [], []
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for chunk in server.stream("/generate", **LONG | {"max_tokens": 1500}):
            chunks.append(chunk)
            if len(chunks) == 3:
                server.process.send_signal(signal.SIGTERM)
            elif len(chunks) > 3 and not refusals and client.get("/ready").status_code == 503:
                response = client.post("/generate", json=LONG)
                assert response.status_code == 503
                refusals.append(response.json()["error"]["message"])
                assert client.get("/health").status_code == 200
    assert len(chunks) == 1500 and chunks[-1]["finish_reason"] == "length"
    assert refusals and "shutting down" in refusals[0]
    assert server.wait(30) == 0
    assert "Traceback" not in server.text()


def test_a_killed_rank_fails_its_requests_and_ends_the_server(model, tmp_path):
    with serve(tmp_path, model) as server:
        errors = []

        def read_stream():
            try:
                for chunk in server.stream("/generate", **LONG):
                    errors.append(chunk)
            except httpx.RemoteProtocolError:
                errors.append("broken")

        def read_whole():
            with httpx.Client(base_url=server.url, timeout=60) as client:
                answers.append(client.post("/generate", json=LONG))

        answers = []
        threads = [threading.Thread(target=work) for work in (read_stream, read_whole)]
        for thread in threads:
            thread.start()
        server.until(lambda: server.stats()["dp_ranks"][0]["num_running"] == 2)
        (rank,) = server.ranks()
        rank.kill()
        start_s = time.monotonic()
        for thread in threads:
            thread.join(30)
        assert time.monotonic() - start_s < 15
        (answer,) = answers
        assert answer.status_code == 500
        assert "killed by SIGKILL" in answer.json()["error"]["message"]
        assert errors[-1] == "broken" and "killed by SIGKILL" in errors[-2]["error"]["message"]
        assert server.wait(30) == 1
        assert "rank 0 ended without a result: killed by SIGKILL" in server.text()
        assert "Traceback" not in server.text()


@pytest.mark.multiproc
def test_a_server_that_is_killed_leaves_no_rank(model, tmp_path):
    with serve(tmp_path, model) as server:
        ranks = server.ranks()
        server.process.kill()
        server.process.wait()
        gone, alive = psutil.wait_procs(ranks, timeout=20)
        assert gone and not alive


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("option", "overrides", "num_ranks"),
    [
        ("llama", ["parallel=tp2"], 2),
        ("llama", ["parallel=dp2"], 2),
        ("qwen3_moe", ["parallel=dp2tp2"], 4),
        ("llama", ["parallel=cp2", "kv_cache.enable_prefix_cache=false"], 2),
        ("gpt_oss", ["parallel=tp2", "scheduler.enable_chunked_prefill=false"], 2),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_several_ranks_have_the_tokens_of_an_offline_run(
    tiny_hf_model, tmp_path, option, overrides, num_ranks
):
    model = tiny_hf_model(option, eos_token_id=None)
    sampling = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    expected = offline_generator(option, model)(PROMPTS, **sampling)
    words = ["kv_cache.block_size=16", *overrides]
    with serve(tmp_path, model, *words, option=option) as server:
        assert len(server.ranks()) == num_ranks
        for work in (whole_ids, stream_ids):
            with ThreadPoolExecutor(NUM_REQUESTS) as pool:
                found = list(pool.map(work, [server] * NUM_REQUESTS, PROMPTS))
            assert found == expected
        server.wait_until_idle()
        stats = server.stats()
        assert all(rank["num_steps"] > 0 for rank in stats["dp_ranks"]), "every DP rank works"
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, server.text()


def whole_ids(server, prompt):
    return generate(server, prompt)["output_ids"]


def stream_ids(server, prompt):
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/generate", json=body | {"stream": True}) as response,
    ):
        lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return [token for line in lines for token in json.loads(line[6:])["output_ids"]]


@pytest.mark.multiproc
def test_one_rank_of_several_that_dies_is_named_and_all_end(model, tmp_path):
    with serve(tmp_path, model, "parallel=tp2") as server:
        ranks = server.ranks()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(server.post, "/generate", **LONG)
            server.until(lambda: server.stats()["dp_ranks"][0]["num_running"] == 1)
            follower = max(ranks, key=lambda process: process.pid)
            follower.kill()
            start_s = time.monotonic()
            answer = future.result()
        assert time.monotonic() - start_s < 20
        assert answer.status_code == 500
        assert "killed by SIGKILL" in answer.json()["error"]["message"]
        assert server.wait(30) == 1
        assert not any(process.is_running() for process in ranks)


@pytest.mark.multiproc
def test_a_loop_that_does_not_tick_is_noticed_and_its_stack_is_kept(model, tmp_path):
    with serve(tmp_path, model, "+runner.params.watchdog_s=3") as server:
        (rank,) = server.ranks()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(server.post, "/generate", **LONG)
            server.until(lambda: server.stats()["dp_ranks"][0]["num_running"] == 1)
            rank.send_signal(signal.SIGSTOP)
            start_s = time.monotonic()
            answer = future.result()
        assert answer.status_code == 500
        assert "the loop of DP rank 0 has not ticked for 3 s" in answer.json()["error"]["message"]
        assert time.monotonic() - start_s < 15
        assert server.wait(30) == 1
        assert "has not ticked for 3 s" in server.text()


@pytest.mark.multiproc
def test_a_drain_has_a_limit_and_a_second_signal_ends_it(model, tmp_path):
    with serve(tmp_path, model, "+runner.params.drain_limit_s=1") as server:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(server.post, "/generate", **LONG)
            server.until(lambda: server.stats()["dp_ranks"][0]["num_running"] == 1)
            server.process.send_signal(signal.SIGTERM)
            answer = future.result()
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
        assert server.wait(30) == 0
    with serve(tmp_path / "second", model) as server:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(server.post, "/generate", **LONG)
            server.until(lambda: server.stats()["dp_ranks"][0]["num_running"] == 1)
            server.process.send_signal(signal.SIGTERM)
            server.until(lambda: server.stats()["status"] == "draining")
            server.process.send_signal(signal.SIGTERM)
            assert future.result().status_code == 503
        assert server.wait(30) == 128 + signal.SIGTERM


@pytest.mark.multiproc
def test_a_port_that_is_taken_and_a_model_that_fails_are_told(model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(AssertionError, match=rf"disagg.http_port={port}\s+cannot be used"),
            serve(tmp_path, model, f"disagg.http_port={port}"),
        ):
            pass
        with (
            pytest.raises(AssertionError, match=rf"disagg.zmq_port={port}\s+cannot be used"),
            serve(tmp_path / "zmq", model, f"disagg.zmq_port={port}"),
        ):
            pass
    directory = tmp_path / "broken"
    directory.mkdir()
    (directory / "broken_parts.py").write_text(BROKEN)
    words = ["scheduler._target_=broken_parts.Broken", "allowed_targets=[broken_parts]"]
    with (
        pytest.raises(
            AssertionError,
            match=r"inferkit: scheduler\._target_=broken_parts\.Broken failed while it was built: "
            r"ConfigError: this scheduler never works\n  at broken_parts\.py:8 in __init__\n",
        ),
        serve(directory, model, *words),
    ):
        pass


BROKEN = """
from inferkit.core.errors import ConfigError
from inferkit.scheduler.scheduler import Scheduler

class Broken(Scheduler):
    def __init__(self, **keywords):
        super().__init__(**keywords)
        raise ConfigError("this scheduler never works")
"""
