"""Many requests: clients that leave at random, memory that stays flat, bytes that arrive wrong."""

import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from inferkit import OfflineInference, SamplingParams, load_config
from tests.pd.deployments import ROOT, cluster, generate_all

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

WORDS = [
    "model=llama",
    "model.dtype=float32",
    "kv_cache.block_size=16",
    "engine.warm_up=false",
    "disagg.stash_s=6",
]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
NUM_CLIENTS = 300
NUM_REQUESTS = 2000
NUM_WARM = 500
"""Requests before memory is looked at: pools and caches are full by then."""
MAX_GROWTH = 1.05


@pytest.fixture(scope="module")
def words(tiny_hf_model):
    return [*WORDS, f"model.path={tiny_hf_model('llama', eos_token_id=None)}"]


def test_three_hundred_clients_that_leave_at_random_leave_nothing(words, tmp_path):
    """Decode is short of blocks, so that they leave in every state: waiting, retracted, ..."""
    limits = ["kv_cache.num_blocks=64", "engine.max_model_len=960"]
    with cluster(tmp_path, *words, *limits) as service:
        body = {"prompt": [9, 8, 7] * 20, "max_tokens": 40, **GREEDY}
        expected = service.router.generate(**body)

        def leave(seed):
            rng = random.Random(seed)
            client = service.router.open(
                prompt=[rng.randrange(3, 250) for _ in range(rng.randrange(1, 300))],
                max_tokens=rng.randrange(1, 600),
                stream=rng.random() < 0.5,
                **GREEDY,
            )
            time.sleep(rng.expovariate(1 / 0.5))
            client.close()

        with ThreadPoolExecutor(24) as pool:
            leaving = pool.map(leave, range(NUM_CLIENTS))
            # Those who stay are served meanwhile.
            staying = [service.router.generate(**body) for _ in range(10)]
            list(leaving)
        assert [answer["output"] for answer in staying] == [expected["output"]] * 10
        service.wait_until_idle()
        assert service.router.generate(**body)["output"] == expected["output"]
        stats = service.stats("decode")[0]["dp_ranks"][0]["hand_off"]
        assert stats["num_free_slots"] == 32
        assert not any(v for k, v in stats.items() if k.startswith("dropped_malformed"))


def test_two_thousand_requests_leave_memory_flat_and_answers_equal(words, tmp_path):
    rng = random.Random(0)
    with cluster(tmp_path, *words, "kv_cache.num_blocks=256") as service:
        first = {"prompt": "the first and the last", "max_tokens": 48, **GREEDY}
        expected = service.router.generate(**first)

        def run(count):
            bodies = [
                {
                    "prompt": [rng.randrange(3, 250) for _ in range(rng.randrange(1, 100))],
                    "max_tokens": rng.randrange(1, 16),
                    **GREEDY,
                }
                for _ in range(count)
            ]
            for answer, body in zip(generate_all(service.router, bodies, 16), bodies, strict=True):
                assert len(answer["output_ids"]) == body["max_tokens"]
            service.wait_until_idle()

        run(NUM_WARM)
        before = resident_bytes(service.command.family())
        run(NUM_REQUESTS - NUM_WARM)
        after = resident_bytes(service.command.family())
        assert before.keys() == after.keys(), "a process was started again"
        growth = {name: after[name] / before[name] for name in before}
        print(f"growth of memory over {NUM_REQUESTS - NUM_WARM} requests: {growth}")
        assert max(growth.values()) < MAX_GROWTH, growth
        again = service.router.generate(**first)
        assert again["output"] == expected["output"]
        assert again["output_ids"] == expected["output_ids"]
        stats = service.router.stats()
        assert stats["retries"] == 0 and stats["ignored_outputs"] == 0


def test_far_more_requests_than_fit_are_all_answered_right(words, tmp_path):
    """Chunks, prefix hits, queues and retractions; whatever waits is served in the end."""
    rng = random.Random(5)
    starts = [[rng.randrange(3, 250) for _ in range(300)] for _ in range(6)]
    prompts = []
    for _ in range(200):
        own = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 200))]
        prompts.append(rng.choice(starts)[: rng.randrange(300)] + own)
    bodies = [{"prompt": p, "max_tokens": rng.randrange(1, 200), **GREEDY} for p in prompts]
    offline = ["engine.max_model_len=768", "data.input_truncated_len=560"]
    llm = OfflineInference(load_config([*words[:3], words[-1], *offline]))
    longest = SamplingParams(max_tokens=200, **GREEDY)
    expected = [result.token_ids for result in llm.generate(prompts, longest)]
    limits = [
        "engine.max_model_len=768",
        "kv_cache.num_blocks=56",
        "scheduler.max_prefill_tokens=96",
        "scheduler.batch_size=24",
        "cluster.decode_overrides='scheduler.num_reserved_decode_tokens=0'",
    ]
    with cluster(tmp_path, *words, *limits) as service:
        answers = generate_all(service.router, bodies, 100)
        for answer, body, tokens in zip(answers, bodies, expected, strict=True):
            assert answer["output_ids"] == tokens[: body["max_tokens"]]
        service.wait_until_idle()
        assert service.router.stats()["retries"] == 0


def resident_bytes(processes: list[psutil.Process]) -> dict[int, int]:
    return {process.pid: process.memory_info().rss for process in processes}


def test_a_block_that_arrives_wrong_is_an_error_and_never_text(words, tmp_path):
    trigger = tmp_path / "corrupt"
    folder = tmp_path / "own"
    folder.mkdir()
    engine = "corrupting_engine"
    shutil.copy(Path(__file__).with_name(f"{engine}.py"), folder)
    own = [
        "kv_cache.num_blocks=128",
        f"allowed_targets=[{engine}]",
        f"disagg.transfer._target_={engine}.CorruptingEngine",
        f"+disagg.transfer.params.trigger={trigger}",
        "disagg.verify_digest=true",
    ]
    with cluster(tmp_path, *words, *own, PYTHONPATH=f"{ROOT}:{folder}") as service:
        body = {"prompt": [5 + i for i in range(70)], "max_tokens": 8, **GREEDY}
        expected = service.router.generate(**body)["output_ids"]
        trigger.touch()
        for streamed in (False, True):
            start_s = time.monotonic()
            response = service.router.post("/generate", **body, stream=streamed)
            assert response.status_code == 503, response.text
            message = response.json()["error"]["message"]
            assert "is not what arrived" in message
            assert time.monotonic() - start_s < 20
        # A first token that ends the answer needs no KV.
        trigger.unlink()
        service.wait_until_served(60)
        assert service.router.generate(**body)["output_ids"] == expected
        service.wait_until_idle()
        assert service.router.stats()["retries"] == 2
