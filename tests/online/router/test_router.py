"""A router over real HTTP: pairs, retries, refusals, faults, joining and leaving."""

import asyncio
import itertools
import json
import time
from collections import Counter
from dataclasses import replace

import httpx
import pytest

from inferkit.core.request import FinishReason
from inferkit.online.facts import Side
from inferkit.online.router.pairs import Policy
from inferkit.online.router_signature import RouterSignatures
from tests.online.router.instances import (
    FakeInstance,
    breaking,
    dead_url,
    echo,
    ending,
    error,
    for_clients,
    instances,
    refusing,
    router_of,
    silence,
    silent,
    until,
)
from tests.online.serving import run


def attempts(*fakes):
    """(prefill id, decode id, attempt) of the legs of clients, in the order they came."""
    return [
        (leg.message.pair.prefill_id, leg.message.pair.decode_id, leg.message.attempt)
        for fake in fakes
        for leg in fake.requests()
    ]


# -- the good case -------------------------------------------------------------------------------


def test_both_legs_get_the_same_request_and_the_client_gets_the_text_of_decode():
    async def check():
        async with instances(1, 1) as (p, d), router_of(p, d) as routed:
            d.script = slow_decode
            response = await routed.generate(
                "abc", max_tokens=5, seed=7, bootstrap_room=99, temperature=0.5
            )
            answer = response.json()
            assert response.status_code == 200, response.text
            assert answer["output"] == "abcab" and answer["bootstrap_room"] == "99"
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
            assert response.headers["x-request-id"] == answer["request_id"]
            (one,), (two,) = p.requests(), d.requests()
            left, right = one.message, two.message
            assert (left.room, left.seed, left.token_ids) == (99, 7, [64, 65, 66])
            assert left.request_id == answer["request_id"]
            for name in ("attempt", "room", "sampling", "seed", "token_ids", "pair", "epoch"):
                assert getattr(left, name) == getattr(right, name), name
            assert (left.peer_epoch, right.peer_epoch) == (p.epoch, d.epoch)
            pair = left.pair
            assert (pair.prefill_id, pair.prefill_epoch) == (p.instance_id, p.epoch)
            assert (pair.decode_id, pair.decode_epoch) == (d.instance_id, d.epoch)
            assert pair.bootstrap_url == p.facts.bootstrap_url
            assert 1_700_000 < left.remaining_ms <= 1_805_000
            await until(lambda: one.is_over and two.is_over)
            stats = (await routed.client.get("/stats")).json()
            assert stats["retries"] == 0 and stats["requests"]["running"] == 0
            assert all(entry["outstanding_tokens"] == 0 for entry in stats["instances"])

    run(check())


def test_every_interface_works_over_a_pair():
    async def check():
        async with instances(1, 1) as (p, d), router_of(p, d) as routed:
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            response = await routed.client.post("/v1/chat/completions", json=chat)
            assert response.json()["usage"]["completion_tokens"] == 3
            body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 4, "logprobs": 1, "stop": "bab"}
            response = await routed.client.post("/v1/completions", json=body)
            texts = [choice["text"] for choice in response.json()["choices"]]
            assert texts == ["a", "a", "cdcd", "cdcd"]
            assert len(response.json()["choices"][2]["logprobs"]["tokens"]) == 4
            sent = [leg.message for leg in p.requests()][-4:]
            assert sorted(message.sample_index for message in sent) == [0, 0, 1, 1]
            assert len({message.room for message in sent}) == 4
            streamed = await routed.generate("ab", stream=True)
            blocks = streamed.text.split("\n\n")
            texts = [json.loads(block[6:])["output"] for block in blocks[:-2]]
            assert texts == list("abab") and blocks[-2:] == ["data: [DONE]", ""]
            models = (await routed.client.get("/v1/models")).json()
            assert models["data"][0]["id"] == "echo"

    run(check())


def test_a_pair_is_proven_by_two_tokens_before_clients_use_it():
    async def check():
        async with instances(1, 1) as (p, d):
            d.script = silence
            async with router_of(p, d, proven=0) as routed:
                await until(lambda: len(d.legs) == 1)
                assert d.legs[0].is_probe and d.legs[0].message.sampling.max_tokens == 2
                ready = await routed.client.get("/ready")
                assert ready.status_code == 503
                assert "the first generation is under way" in ready.json()["reasons"][0]
                assert (await routed.client.get("/health")).status_code == 200
                response = await routed.generate()
                assert response.status_code == 503 and response.headers["retry-after"] == "1"
                assert "no pair has generated" in response.text
                assert not p.requests() and not d.requests()

    run(check())


def test_the_first_token_waits_for_nothing_but_its_legs():
    async def check():
        async with instances(1, 1) as (p, d), router_of(p, d) as routed:
            direct, through = [], []
            for number in range(30):
                begin_s = time.perf_counter()
                await routed.client.get("/health")
                direct.append(time.perf_counter() - begin_s)
                begin_s = time.perf_counter()
                await routed.generate(max_tokens=1, bootstrap_room=number + 1)
                through.append(time.perf_counter() - begin_s)
            # Three HTTP requests instead of one; a poll or a delay of TCP would be a hundred.
            assert min(through) < 20 * min(direct), (min(through), min(direct))

    run(check())


# -- pairing -------------------------------------------------------------------------------------


def test_by_hash_every_prefill_works_with_every_decode():
    async def check():
        async with instances(2, 2) as (p1, p2, d1, d2), router_of(p1, p2, d1, d2) as routed:
            d1.script = d2.script = slow_decode
            await asyncio.gather(*(routed.generate(max_tokens=1) for _ in range(60)))
            pairs = Counter((p, d) for p, d, _ in attempts(d1, d2))
            assert len(pairs) == 4 and min(pairs.values()) >= 4
            numbers = [attempt for *_, attempt in attempts(d1, d2)]
            assert len(numbers) == len(set(numbers)) == 60
            assert set(attempts(p1, p2)) <= set(attempts(d1, d2))

    run(check())


def test_the_least_loaded_instances_are_chosen():
    async def check():
        async with instances(2, 2) as fakes:
            p1, p2, d1, d2 = fakes
            for fake in fakes:
                fake.script = silent
            async with router_of(*fakes, policy=Policy.LEAST_LOADED) as routed:
                tasks = []
                for count in range(1, 5):
                    tasks.append(asyncio.create_task(routed.generate("ab", max_tokens=10)))
                    await until(lambda n=count: len(attempts(p1, p2)) == n)
                    await until(lambda n=count: len(attempts(d1, d2)) == n)
                assert [len(fake.requests()) for fake in fakes] == [2, 2, 2, 2]
                loads = [
                    entry["outstanding_tokens"] for entry in routed.dispatcher.stats()["instances"]
                ]
                assert sorted(loads) == [4, 4, 20, 20]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await until(lambda: not any(routed.dispatcher.pairs.outstanding.values()))

    run(check())


# -- retries -------------------------------------------------------------------------------------


FAILURES = [
    refusing(503, "busy"),
    refusing(500, "bug"),
    refusing(409, "room is active"),
    refusing(503, "draining", "draining"),
    breaking(),
    ending(FinishReason.UNAVAILABLE, "no blocks"),
    ending(FinishReason.CONFLICT, "room is active"),
    ending(FinishReason.ABORT, "transfer failed"),
]


@pytest.mark.parametrize("side", list(Side))
def test_what_fails_before_the_first_token_is_tried_on_another_pair(side):
    async def check():
        async with instances(2, 2) as fakes, router_of(*fakes) as routed:
            bad = next(fake for fake in fakes if fake.side is side)
            others = [fake for fake in fakes if fake.side is not side]
            for script in FAILURES:
                for fake in fakes:
                    fake.script = slow_decode
                    fake.legs.clear()
                while any(pair["num_failures"] for pair in routed.dispatcher.pairs.stats()):
                    assert (await routed.generate()).status_code == 200
                bad.script = script
                bad.legs.clear()
                before = routed.dispatcher.num_retries
                while not bad.requests():
                    response = await routed.generate(bootstrap_room=5)
                    assert response.status_code == 200, response.text
                    assert response.json()["output"] == "abca"
                assert routed.dispatcher.num_retries == before + 1
                (failed,) = bad.requests()
                for leg in (leg for fake in others for leg in fake.requests()):
                    if leg.message.attempt == failed.message.attempt:
                        await until(lambda leg=leg: leg.is_closed or leg.is_over)
                numbers = Counter(leg.message.attempt for f in others for leg in f.requests())
                assert max(numbers.values()) == 1, "an attempt is never used twice"

    run(check())


async def _slow(instance, leg):
    if instance.side is Side.DECODE:
        await asyncio.sleep(0.05)
    async for entry in echo(instance, leg):
        yield entry


slow_decode = for_clients(_slow)


def test_without_another_pair_the_same_one_is_tried_again():
    async def check():
        async with instances(1, 1) as (p, d), router_of(p, d) as routed:
            count = 0

            def once(instance, leg):
                nonlocal count
                count += 1
                return error(503, "busy") if count == 1 else echo(instance, leg)

            d.script = once
            response = await routed.generate()
            assert response.status_code == 200 and count == 2
            assert len(set(attempts(d))) == 2

    run(check())


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_when_no_try_is_left_the_client_hears_what_each_one_said(retries):
    async def check():
        async with instances(2, 2) as fakes:
            for fake in fakes[2:]:
                fake.script = refusing(503, f"busy {fake.instance_id}")
            async with router_of(*fakes, retries=retries) as routed:
                response = await routed.generate()
                assert response.status_code == 503 and response.headers["retry-after"] == "1"
                text = response.json()["error"]["message"]
                assert text.count("busy decode-") == 1 + retries
                assert f"{1 + retries} of {1 + retries} tries" in text
                if retries:
                    assert all(fake.instance_id in text for fake in fakes[2:])
                assert len(attempts(*fakes[:2])) == 1 + retries

    run(check())


def test_a_room_that_stays_taken_is_a_conflict():
    async def check():
        async with instances(1, 1) as (p, d):
            p.script = ending(FinishReason.CONFLICT, "another router has it")
            d.script = silent
            async with router_of(p, d) as routed:
                response = await routed.generate(bootstrap_room=11)
                assert response.status_code == 409
                assert "another router has it" in response.text
                assert "bootstrap_room=11" in response.text

    run(check())


def test_a_room_that_is_active_here_is_refused_at_once():
    async def check():
        async with instances(1, 1) as (p, d), router_of(p, d) as routed:
            d.script = silent
            first = asyncio.create_task(routed.generate(bootstrap_room=3))
            await until(lambda: bool(d.requests()))
            again = await asyncio.gather(*(routed.generate(bootstrap_room=3) for _ in range(3)))
            assert [response.status_code for response in again] == [409] * 3
            aborted = await routed.client.post("/abort", json={"bootstrap_room": "3"})
            assert aborted.json() == {"aborted": 1}
            assert (await first).json()["finish_reason"] == "abort"
            d.script = None
            assert (await routed.generate(bootstrap_room=3)).status_code == 200
            both = [routed.generate(bootstrap_room=4, max_tokens=50) for _ in range(2)]
            codes = [response.status_code for response in await asyncio.gather(*both)]
            assert sorted(codes) == [200, 409], "also when both are tokenised at the same time"

    run(check())


# -- refusals ------------------------------------------------------------------------------------


TOO_LONG = "prompt: it has 9 tokens, 8 fit"
REFUSALS = [
    refusing(400, TOO_LONG),
    ending(FinishReason.REFUSED, TOO_LONG),
    ending(FinishReason.PROMPT_TOO_LONG, TOO_LONG),
]


@pytest.mark.parametrize("side", list(Side))
def test_a_refusal_of_either_leg_ends_the_other_and_reaches_the_client(side):
    async def check():
        async with instances(2, 2) as fakes, router_of(*fakes) as routed:
            for script, is_streamed in itertools.product(REFUSALS, (True, False)):
                for fake in fakes:
                    fake.script = script if fake.side is side else silent
                    fake.legs.clear()
                begin_s = time.perf_counter()
                response = await routed.generate(stream=is_streamed)
                assert time.perf_counter() - begin_s < 5
                assert response.status_code == 400, response.text
                error = response.json()["error"]
                assert error["message"] == TOO_LONG
                assert error["type"] == "invalid_request_error"
                for leg in [leg for f in fakes if f.side is not side for leg in f.requests()]:
                    await until(lambda leg=leg: leg.is_closed)
            assert routed.dispatcher.num_retries == 0
            breakers = routed.dispatcher.pairs.stats()
            assert {entry["num_failures"] for entry in breakers} == {0}

    run(check())


# -- failures after the first token --------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    "script", [breaking(after=2), ending(FinishReason.UNAVAILABLE, "worker died", after=2)]
)
def test_after_the_first_token_a_failure_of_decode_is_an_error(script, is_streamed):
    async def check():
        async with instances(2, 2) as fakes:
            for fake in fakes:
                fake.script = script if fake.side is Side.DECODE else silent
            async with router_of(*fakes) as routed:
                if is_streamed:
                    text = await broken_stream(routed, prompt="abc", max_tokens=4)
                    events = [json.loads(line[6:]) for line in text.split("\n\n") if line]
                    assert [event.get("output") for event in events] == ["a", "b", None]
                    error = events[-1]["error"]
                else:
                    response = await routed.generate()
                    assert response.status_code == 500
                    error = response.json()["error"]
                assert "the answer is incomplete" in error["message"]
                assert "decode instance decode-" in error["message"]
                assert len([leg for f in fakes for leg in f.requests()]) == 2, "no retry"
                (prefill,) = [leg for f in fakes[:2] for leg in f.requests()]
                await until(lambda: prefill.is_closed)

    run(check())


async def broken_stream(routed, **body):
    """Text of a stream that must end without its end."""
    pieces = []
    with pytest.raises(Exception, match="incomplete chunked read|peer closed"):
        async with routed.client.stream("POST", "/generate", json=body | {"stream": True}) as r:
            async for piece in r.aiter_text():
                pieces.append(piece)
    return "".join(pieces)


@pytest.mark.parametrize("script", [breaking(), ending(FinishReason.UNAVAILABLE, "gone")])
def test_a_prefill_that_fails_after_decode_runs_changes_nothing(script):
    async def check():
        async with instances(1, 1) as (p, d), router_of(p, d) as routed:
            d.tick_s = 0.02

            async def late(instance, leg):
                await asyncio.sleep(0.05)
                async for entry in script(instance, leg):
                    yield entry

            p.script = late
            response = await routed.generate("ab", max_tokens=8)
            assert response.status_code == 200 and response.json()["output"] == "abababab"
            assert routed.dispatcher.num_retries == 0

    run(check())


# -- the first token of prefill ------------------------------------------------------------------


def test_the_first_token_can_come_from_prefill():
    async def check():
        gate = asyncio.Event()

        async def gated(instance, leg):
            await gate.wait()
            async for entry in echo(instance, leg):
                yield entry

        async with instances(1, 1) as (p, d):
            d.script = for_clients(gated)
            async with router_of(p, d, first_token=Side.PREFILL) as routed:
                body = {"prompt": "ab", "max_tokens": 3, "stream": True, "logprobs": 1}
                async with routed.client.stream("POST", "/generate", json=body) as response:
                    lines = (line async for line in response.aiter_lines() if line)
                    first = json.loads((await anext(lines))[6:])
                    assert first["output"] == "a" and len(first["logprobs"]) == 1
                    gate.set()
                    rest = [json.loads(line[6:]) async for line in lines if line[6:] != "[DONE]"]
                assert [chunk["output"] for chunk in rest] == ["b", "a"]
                assert rest[-1]["finish_reason"] == "length"

    run(check())


def test_one_token_in_all_comes_once():
    async def check():
        async with instances(1, 1) as (p, d):
            p.script = slow_decode
            async with router_of(p, d, first_token=Side.PREFILL) as routed:
                answer = (await routed.generate("ab", max_tokens=1)).json()
                assert (answer["output"], answer["finish_reason"]) == ("a", "length")

    run(check())


def test_a_first_token_that_differs_ends_the_request():
    async def check():
        async with instances(1, 1) as (p, d):

            async def wrong(instance, leg):
                async for entry in echo(instance, leg):
                    await asyncio.sleep(0.1)
                    yield type(entry)(
                        **{
                            **{f: getattr(entry, f) for f in entry.__struct_fields__},
                            "token_ids": [70],
                        }
                    )

            d.script = for_clients(wrong)
            async with router_of(p, d, first_token=Side.PREFILL) as routed:
                text = await broken_stream(routed, prompt="ab", max_tokens=3)
                assert "do not compute the same" in text

    run(check())


def test_after_a_token_of_prefill_there_is_no_retry():
    async def check():
        async with instances(2, 2) as fakes:
            for fake in fakes[2:]:

                async def late(instance, leg):
                    await asyncio.sleep(0.1)
                    yield await anext(ending(FinishReason.UNAVAILABLE, "full")(instance, leg))

                fake.script = for_clients(late)
            async with router_of(*fakes, first_token=Side.PREFILL) as routed:
                text = await broken_stream(routed, prompt="ab", max_tokens=3)
                assert "full" in text and routed.dispatcher.num_retries == 0

    run(check())


# -- clients that leave --------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_closes_both_legs(is_streamed):
    async def check():
        async with instances(1, 1) as (p, d), router_of(p, d) as routed:
            p.script = silent
            d.script = for_clients(endless) if is_streamed else silent
            if is_streamed:
                body = {"prompt": "ab", "max_tokens": 190, "stream": True}
                async with routed.client.stream("POST", "/generate", json=body) as response:
                    await anext(response.aiter_bytes())
            else:
                task = asyncio.create_task(routed.generate())
                await until(lambda: bool(p.requests() and d.requests()))
                task.cancel()
            begin_s = time.perf_counter()
            legs = [p.requests()[0], d.requests()[0]]
            await until(lambda: all(leg.is_closed for leg in legs))
            assert time.perf_counter() - begin_s < 5
            await until(lambda: routed.dispatcher.num_running == 0)
            assert not routed.service._rooms

    run(check())


async def endless(instance, leg):
    instance.tick_s = 0.01
    async for entry in echo(instance, leg):
        yield entry


def test_a_stop_string_closes_both_legs():
    async def check():
        async with instances(1, 1) as (p, d), router_of(p, d) as routed:
            p.script, d.script = silent, for_clients(endless)
            answer = (await routed.generate("abc", max_tokens=190, stop="cab")).json()
            assert (answer["output"], answer["finish_reason"]) == ("ab", "stop")
            await until(lambda: p.requests()[0].is_closed and d.requests()[0].is_closed)

    run(check())


def test_the_deadline_closes_both_legs():
    async def check():
        async with instances(1, 1) as (p, d), router_of(p, d, timeout_s=0.5) as routed:
            p.script = d.script = silent
            response = await routed.generate()
            assert response.status_code == 504
            assert 0 < d.requests()[0].message.remaining_ms <= 5500
            await until(lambda: p.requests()[0].is_closed and d.requests()[0].is_closed)

    run(check())


# -- instances that are not there ----------------------------------------------------------------


def test_what_is_missing_is_named():
    async def check():
        async with instances(1, 1) as (p, d):
            url = dead_url()
            async with router_of(p, decode_urls=[url], proven=0) as routed:
                await until(lambda: not routed.dispatcher.missing()[0].endswith("(not asked yet)"))
                response = await routed.generate()
                assert response.status_code == 503 and "retry-after" in response.headers
                text = response.json()["error"]["message"]
                assert text.startswith("no decode instance takes requests:") and url in text
                assert "prefill" not in text
            async with router_of(proven=0) as routed:
                text = (await routed.generate()).json()["error"]["message"]
                assert "no prefill instance is known" in text
                assert "no decode instance is known; list it in router.decode_urls" in text
            d.state = "draining"
            async with router_of(p, d, proven=0) as routed:
                await until(lambda: "it is draining" in routed.dispatcher.missing()[0])
            wrong = FakeInstance(Side.PREFILL)
            async with wrong, router_of(p, decode_urls=[wrong.url], proven=0) as routed:
                await until(lambda: "it is a prefill instance" in str(routed.dispatcher.missing()))

    run(check())


def test_an_instance_that_dies_takes_its_requests_elsewhere_and_comes_back_as_another():
    async def check():
        async with instances(1, 2) as (p, d1, d2), router_of(p, d1, d2) as routed:
            p.script = d1.script = d2.script = silent
            tasks = [asyncio.create_task(routed.generate()) for _ in range(6)]
            await until(lambda: len(attempts(d1, d2)) == 6)
            num_lost = len(d1.requests())
            d2.script = p.script = None
            await d1.stop()
            await until(lambda: len(d2.requests()) == 6)
            for leg in d2.requests()[: 6 - num_lost]:
                assert not leg.is_over
            assert routed.dispatcher.num_retries == num_lost
            for _ in range(5):
                assert (await routed.generate()).status_code == 200
            again = FakeInstance(Side.DECODE, port=d1.port)
            async with again:
                await routed.pairs_proven(2)
                assert any(leg.is_probe for leg in again.legs)
                before = len(again.requests())
                while len(again.requests()) == before:
                    assert (await routed.generate()).status_code == 200
                assert again.legs[-1].message.peer_epoch == again.epoch
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(check())


def test_a_restart_that_the_router_has_not_seen_yet_costs_no_request():
    async def check():
        async with instances(1, 2) as (p, d1, d2), router_of(p, d1, d2) as routed:
            successor = await d1.restart()
            try:
                codes = [(await routed.generate()).status_code for _ in range(20)]
                assert codes == [200] * 20
                await routed.pairs_proven(2)
                while not successor.requests():
                    assert (await routed.generate()).status_code == 200
            finally:
                await successor.stop()

    run(check())


def test_a_pair_that_fails_again_and_again_gets_no_request_until_a_probe_is_well():
    async def check():
        async with instances(1, 2) as (p, d1, d2), router_of(p, d1, d2) as routed:
            d1.script = lambda instance, leg: error(500, "out of order")
            while d1.script and len(d1.requests()) < 3:
                assert (await routed.generate()).status_code == 200
            before = len(d1.requests())
            for _ in range(10):
                assert (await routed.generate()).status_code == 200
            assert len(d1.requests()) == before
            assert "open" in {entry["breaker"] for entry in routed.dispatcher.pairs.stats()}
            assert any("out of order" in e["last_error"] for e in routed.dispatcher.pairs.stats())
            d1.script = None
            await routed.pairs_proven(2)
            assert len(d1.requests()) == before, "the router asks, not a client"

    run(check())


def test_with_every_pair_open_the_cause_is_told_and_service_comes_back():
    async def check():
        async with instances(1, 1) as (p, d), router_of(p, d) as routed:
            d.script = lambda instance, leg: error(500, "out of order")
            for _ in range(4):
                response = await routed.generate()
                assert response.status_code == 503 and "out of order" in response.text
            ready = await routed.client.get("/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "unavailable")
            d.script = None
            await routed.pairs_proven(1)
            assert (await routed.client.get("/ready")).json() == {"status": "ready"}
            assert (await routed.generate()).status_code == 200

    run(check())


# -- joining and leaving -------------------------------------------------------------------------


def test_instances_join_and_leave():
    async def check():
        async with instances(1, 1) as (p, d), router_of(proven=0) as routed:
            for fake in (p, d):
                response = await routed.client.post("/instances", json=fake.facts.to_json())
                assert response.status_code == 200, response.text
            assert response.json() == {"bootstrap_urls": [p.facts.bootstrap_url]}
            await routed.pairs_proven(1)
            d.tick_s = 0.05
            running = asyncio.create_task(routed.generate(max_tokens=10))
            await until(lambda: bool(d.requests()))
            left = await routed.client.delete(f"/instances/{d.instance_id}")
            assert left.json() == {"left": True}
            assert (await routed.generate()).status_code == 503
            assert (await running).status_code == 200, "what runs goes on"
            left = await routed.client.delete(f"/instances/{d.instance_id}")
            assert left.json() == {"left": False}

    run(check())


def test_without_a_secret_only_this_host_may_join():
    async def check():
        async with router_of(proven=0) as routed:
            body = FakeInstance(Side.PREFILL, url="http://127.0.0.1:1").facts.to_json()
            statuses = {}
            for host in ("127.0.0.1", "::1", "203.0.113.9", "unknown", "10.0.0.7"):
                transport = httpx.ASGITransport(app=routed.router.app, client=(host, 5))
                options = {"transport": transport, "base_url": "http://10.0.0.7:8000"}
                async with httpx.AsyncClient(**options) as client:
                    response = await client.post("/instances", json=body)
                    statuses[host] = response.status_code
                    deleted = await client.delete("/instances/x")
                    assert deleted.status_code == response.status_code
            assert statuses == {
                "127.0.0.1": 200,
                "::1": 200,
                "203.0.113.9": 401,
                "unknown": 401,
                "10.0.0.7": 200,
            }

    run(check())


def test_an_instance_of_another_host_names_an_address_that_the_router_reaches():
    async def check():
        async with router_of(proven=0, secret=b"ours") as routed:
            fake = FakeInstance(Side.PREFILL, url="http://127.0.0.1:1")
            transport = httpx.ASGITransport(app=routed.router.app, client=("10.0.0.9", 5))
            options = {"transport": transport, "base_url": "http://10.0.0.7:8000"}
            async with httpx.AsyncClient(**options) as client:
                answers = []
                for url, bootstrap_url in (
                    ("http://127.0.0.1:1", "http://10.0.0.9:2"),
                    ("http://10.0.0.9:1", "http://localhost:2"),
                    ("http://10.0.0.9:1", "http://10.0.0.9:2"),
                ):
                    facts = replace(fake.facts, url=url, bootstrap_url=bootstrap_url)
                    body = json.dumps(facts.to_json()).encode()
                    headers = RouterSignatures(b"ours").headers("POST", "/instances", body)
                    answers.append(await client.post("/instances", content=body, headers=headers))
            assert [answer.status_code for answer in answers] == [400, 400, 200]
            words = [answer.json()["error"]["message"] for answer in answers[:2]]
            assert "url=http://127.0.0.1:1 is an address of your own host only" in words[0]
            assert "bootstrap_url=http://localhost:2" in words[1] and "10.0.0.9" in words[1]

    run(check())


def test_a_router_that_fails_inside_says_so_and_takes_nothing():
    async def check():
        async with instances(1, 1) as (p, d), router_of(p, d) as routed:
            d.script = silent
            running = asyncio.create_task(routed.generate())
            await until(lambda: bool(d.requests()))

            async def broken():
                raise KeyError("nobody expected this")

            routed.dispatcher._spawn(broken())
            assert (await running).status_code == 500
            response = await routed.generate()
            assert response.status_code == 503 and "the router failed" in response.text
            assert (await routed.client.get("/ready")).json()["status"] == "failed"

    run(check())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"role": "serve"}, "role='serve' takes no legs; allowed are prefill and decode"),
        ({"url": "file:///etc"}, "url='file:///etc' is no address"),
        ({"url": "http://x:99999"}, "is no address; give it as http://host:port"),
        ({"bootstrap_url": None}, "bootstrap_url='' is no address"),
        ({"epoch": -1}, "epoch=-1 is no number of 64 bits"),
        ({"epoch": str(2**64)}, "is no number of 64 bits"),
        ({"instance_id": ""}, "instance_id='' is no name"),
        ({"state": "happy"}, "state='happy' is unknown"),
        ({"protocol_version": 99}, "speaks protocol_version=99, the router 1"),
    ],
)
def test_who_may_not_join_is_told_why(changes, words):
    async def check():
        async with router_of(proven=0) as routed:
            facts = FakeInstance(Side.PREFILL, url="http://127.0.0.1:1").facts.to_json()
            response = await routed.client.post("/instances", json=facts | changes)
            assert response.status_code == 400 and words in response.json()["error"]["message"]
            response = await routed.client.post("/instances", content=b"{")
            assert response.status_code == 400
            assert routed.dispatcher.registry.urls == []

    run(check())


def test_a_probe_that_hangs_holds_up_no_drain():
    async def check():
        async with instances(1, 1) as (p, d):
            d.script = p.script = silence
            async with router_of(p, d, proven=0) as routed:
                await until(lambda: len(d.legs) == len(p.legs) == 1)
                assert routed.dispatcher.num_running == 0
                assert await routed.service.drained(5.0)
                d.state = "draining"
                routed.dispatcher.poller.wake(d.url)
                await until(lambda: d.legs[0].is_closed and p.legs[0].is_closed)
                d.state, d.script, p.script = "ready", None, None
                await routed.pairs_proven(1)

    run(check())
