"""Roles that are killed in the midst of requests: everyone hears of it in bounded time, the others
serve on, and whoever comes back at the same address serves again. Nothing stays held.
"""

import contextlib
import os
import signal
import threading
import time

import httpx
import psutil
import pytest

from tests.pd.deployments import Nodes, assert_ended, cluster, generate_all

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]

PROMPTS = [[10 + (i * 37 + j * j * 11) % 240 for j in range(20 + 9 * i)] for i in range(6)]
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
LONG = {"prompt": [7, 8, 9], "max_tokens": 1000, "ignore_eos": True, "temperature": 0.0}
ERROR_LIMIT_S = 40.0
"""From a death to the last answer of a request that ran there."""
BACK_LIMIT_S = 300.0
WORDS = [
    "model=llama",
    "model.dtype=float32",
    "kv_cache.block_size=16",
    "kv_cache.num_blocks=256",
    "engine.warm_up=false",
    "disagg.lease_s=6",
    "disagg.fence_timeout_s=2",
    "disagg.stash_s=6",
    "disagg.heartbeat_interval_s=2",
]


class Clients:
    """Requests that run while something dies: one streams, one waits for all of its answer."""

    def __init__(self, service):
        self.service = service
        self.ends = {}
        self.num_chunks = 0
        self.threads = [
            threading.Thread(target=work, daemon=True) for work in (self._stream, self._whole)
        ]
        for thread in self.threads:
            thread.start()
        service.until(lambda: self.num_chunks > 0 and service.num_running("decode") == 2)

    def _stream(self):
        url = f"{self.service.router.url}/generate"
        text = ""
        try:
            with httpx.stream("POST", url, json=LONG | {"stream": True}, timeout=120) as response:
                for line in response.iter_lines():
                    self.num_chunks += bool(line)
                    text = line or text
            self.ends["stream"] = text
        except httpx.TransportError as error:
            self.ends["stream"] = f"broken ({error}): {text}"

    def _whole(self):
        url = f"{self.service.router.url}/generate"
        try:
            self.ends["whole"] = httpx.post(url, json=LONG, timeout=120)
        except httpx.TransportError as error:
            self.ends["whole"] = error

    def join(self, limit_s):
        end_s = time.monotonic() + limit_s
        for thread in self.threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        assert set(self.ends) == {"stream", "whole"}, f"no end within {limit_s} s: {self.ends}"
        return self.ends["stream"], self.ends["whole"]


@pytest.fixture(scope="module")
def words(tiny_hf_model):
    return [*WORDS, f"model.path={tiny_hf_model('llama', eos_token_id=None)}"]


def answers(service):
    bodies = [{"prompt": prompt, **GREEDY} for prompt in PROMPTS]
    return [answer["output_ids"] for answer in generate_all(service.router, bodies, len(bodies))]


def assert_serves_again(service, expected):
    service.wait_until_served(BACK_LIMIT_S)
    assert answers(service) == expected
    service.wait_until_idle()


def check_broken(ends, name):
    """What clients of a decode instance hear when it has died."""
    stream, whole = ends
    assert stream.startswith("broken") and '"error"' in stream and name in stream, stream
    assert whole.status_code in (500, 503), whole.text
    assert name in whole.json()["error"]["message"]


def test_any_process_of_a_cluster_may_be_killed(words, tmp_path):
    with cluster(tmp_path, *words) as service:
        expected = answers(service)
        service.wait_until_idle()

        clients = Clients(service)
        service.parent("decode").kill()
        check_broken(clients.join(ERROR_LIMIT_S), "decode")
        assert_serves_again(service, expected)

        # Prefill has done its part: nobody who streams needs it.
        clients = Clients(service)
        service.parent("prefill").kill()
        stream, whole = clients.join(100)
        assert stream == "data: [DONE]" and clients.num_chunks == LONG["max_tokens"] + 1
        assert len(whole.json()["output_ids"]) == LONG["max_tokens"]
        assert_serves_again(service, expected)

        clients = Clients(service)
        router = psutil.Process(service.router.stats()["pid"])
        urls = [entry["url"] for entry in service.instances()]
        router.kill()
        stream, whole = clients.join(ERROR_LIMIT_S)
        assert stream.startswith("broken") and isinstance(whole, httpx.TransportError)
        # Its connections were the requests: instances free them without being told.
        end_s = time.monotonic() + 15
        while any(service.service(url).stats()["requests"]["running"] for url in urls):
            assert time.monotonic() < end_s
            time.sleep(0.1)
        assert_serves_again(service, expected)

        family = service.command.family()
        clients = Clients(service)
        service.command.kill()
        assert_ended(family)
        clients.join(ERROR_LIMIT_S)


def test_one_rank_of_several_that_dies_ends_its_instance_alone(words, tmp_path):
    """Ranks in step on both sides, of unequal number; everything is signed."""
    own = [
        "cluster.prefill=2",
        "cluster.prefill_overrides='parallel=tp2'",
        "cluster.decode_overrides='parallel=dp2'",
        "disagg.secret_env=PD_TEST_SECRET",
    ]
    with cluster(tmp_path, *words, *own, PD_TEST_SECRET="s" * 40) as service:
        expected = answers(service)
        assert answers(service) == expected
        service.wait_until_idle()
        for role in ("decode", "prefill"):
            ids = {entry["instance_id"] for entry in service.instances(role)}
            clients = Clients(service)
            follower = max(service.ranks(role), key=lambda process: process.pid)
            follower.kill()
            ends = clients.join(100)
            if role == "decode":
                check_broken(ends, "decode")
            else:
                assert ends[0] == "data: [DONE]" and answers(service) == expected
            service.until(
                lambda role=role, ids=ids: (
                    len(service.instances(role)) == len(ids)
                    and {entry["instance_id"] for entry in service.instances(role)} != ids
                ),
                BACK_LIMIT_S,
            )
            assert_serves_again(service, expected)


@contextlib.contextmanager
def nodes(tmp_path, words):
    """Router, prefill and decode at addresses of their own, and what a client sees of them."""
    started = Nodes(tmp_path, *words)
    try:
        for role in ("router", "prefill", "decode"):
            started.start(role)
        service = started.deployment()
        service.wait_until_served(BACK_LIMIT_S)
        yield started, service
        service.close()
    finally:
        started.close()


def test_a_role_that_is_started_again_at_its_address_serves_again(words, tmp_path):
    with nodes(tmp_path, words) as (started, service):
        expected = answers(service)
        service.wait_until_idle()
        for role in ("prefill", "decode", "prefill", "router"):
            clients = Clients(service)
            before = service.instances()
            started.commands[role].kill()
            ends = clients.join(100)
            if role == "decode":
                check_broken(ends, "decode")
            start_s = time.monotonic()
            response = None
            if role != "router":
                response = httpx.post(
                    f"{service.router.url}/generate", json=LONG | {"max_tokens": 2}, timeout=60
                )
                assert response.status_code == 503, response.text
                assert role in response.json()["error"]["message"]
                assert time.monotonic() - start_s < 30
            started.start(role)
            if role != "router":
                ids = {entry["instance_id"] for entry in before}
                service.until(
                    lambda ids=ids: (
                        len(service.instances()) == 2
                        and {entry["instance_id"] for entry in service.instances()} != ids
                    ),
                    BACK_LIMIT_S,
                )
            else:
                started.deployment().close()
            assert_serves_again(service, expected)


def test_a_prefill_rank_that_hangs_holds_nothing_of_decode(words, tmp_path):
    """Without new work decode gives its blocks back; the rank itself comes to its senses."""
    with cluster(tmp_path, *words, "router.request_timeout_s=20", "router.retries=0") as service:
        expected = answers(service)
        service.wait_until_idle()
        (rank,) = service.ranks("prefill")
        (decode,) = service.instances("decode")
        rank.send_signal(signal.SIGSTOP)
        try:
            # More than its pool holds: some wait for blocks.
            sockets = [
                service.router.open(**LONG | {"prompt": [5 + i] * 900, "max_tokens": 100})
                for i in range(6)
            ]
            decode_service = service.service(decode["url"])

            def pool():
                return decode_service.stats()["dp_ranks"][0]

            service.until(lambda: pool()["kv_used"] > 100 and pool()["num_waiting"] >= 6)
            start_s = time.monotonic()
            heads = [client.recv(1000).decode().splitlines()[0] for client in sockets]
            assert all(" 503 " in head or " 504 " in head for head in heads), heads
            service.until(lambda: not pool()["kv_used"] and not pool()["hand_off"]["num_known"])
            assert time.monotonic() - start_s < 60
        finally:
            os.kill(rank.pid, signal.SIGCONT)
        for client in sockets:
            client.close()
        assert_serves_again(service, expected)
