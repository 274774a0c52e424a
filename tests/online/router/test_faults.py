"""Many requests while everything fails at random: each one ends, and nothing is left behind."""

import asyncio
import random

import httpx

from inferkit.core.request import FinishReason
from inferkit.online.facts import Side
from inferkit.online.router.registry import LOST_S
from tests.online.router.instances import (
    breaking,
    echo,
    ending,
    for_clients,
    instances,
    refusing,
    router_of,
    silent,
    until,
)
from tests.online.serving import run

NUM_REQUESTS = 150
CONCURRENCY = 12
STATUSES = {200, 500, 503}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


async def well(instance, leg):
    """Decode is a little slower than prefill, as it is."""
    if instance.side is Side.DECODE:
        await asyncio.sleep(0.005)
    async for entry in echo(instance, leg):
        yield entry


SCRIPTS = [
    refusing(503, "busy"),
    refusing(500, "bug"),
    breaking(),
    breaking(after=2),
    ending(FinishReason.UNAVAILABLE, "no blocks"),
    ending(FinishReason.UNAVAILABLE, "transfer failed", after=1),
    ending(FinishReason.CONFLICT, "cancel under way"),
    ending(FinishReason.ABORT, "gave up"),
]


def unreliable(draw, share):
    def script(instance, leg):
        return (draw.choice(SCRIPTS) if draw.random() < share else well)(instance, leg)

    return for_clients(script)


def test_every_request_ends_with_its_own_text_or_an_error():
    async def check():
        draw = random.Random(5)
        async with instances(2, 3) as fakes, router_of(*fakes, retries=2) as routed:
            for fake in fakes:
                fake.script = unreliable(draw, 0.08)
            everyone = list(fakes)
            outcomes = []
            todo = iter(range(NUM_REQUESTS))

            async def client():
                for number in todo:
                    prompt = "".join(draw.choices(LETTERS, k=draw.randint(1, 9)))
                    length = draw.randint(1, 30)
                    ask = routed.generate(prompt, max_tokens=length, stream=draw.random() < 0.5)
                    try:
                        async with asyncio.timeout(0.02 if draw.random() < 0.2 else 30):
                            response = await ask
                    except TimeoutError:
                        outcomes.append("left")
                        continue
                    except httpx.RemoteProtocolError:
                        outcomes.append("broken stream")
                        continue
                    outcomes.append(response.status_code)
                    assert response.status_code in STATUSES, response.text
                    if response.status_code == 200 and response.text.startswith("{"):
                        expected = (prompt * length)[:length]
                        assert response.json()["output"] == expected
                    if number == NUM_REQUESTS // 2:
                        fakes[4] = await fakes[4].restart()
                        fakes[4].script = unreliable(draw, 0.08)
                        everyone.append(fakes[4])

            await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
            assert len(outcomes) == NUM_REQUESTS
            assert outcomes.count(200) > NUM_REQUESTS / 3, outcomes
            assert routed.dispatcher.num_retries > 0
            await until(lambda: routed.dispatcher.num_running == 0)
            legs = [leg for fake in everyone for leg in fake.legs]
            # A refused leg has no frames, so nothing is said of its end.
            sent = [leg for leg in legs if leg.num_sent]
            await until(lambda: all(leg.is_over or leg.is_closed for leg in sent))
            assert not routed.service._rooms and not routed.service.processor._streams
            assert not any(routed.dispatcher.pairs.outstanding.values())
            for fake in fakes:
                fake.script = None
            await routed.pairs_proven(6)
            await until(lambda: routed.dispatcher.legs.num_open == 0)
            answers = [await routed.generate("xyz", max_tokens=6) for _ in range(6)]
            assert [answer.json()["output"] for answer in answers] == ["xyzxyz"] * 6
            await fakes[4].stop()

    run(check())


def test_an_instance_that_gives_no_sign_of_life_is_given_up():
    async def check():
        now_s = 100.0

        def clock():
            return now_s

        async with instances(1, 2) as fakes, router_of(*fakes, clock=clock) as routed:
            p, d1, d2 = fakes
            d1.script = d2.script = silent
            task = asyncio.create_task(routed.generate())
            await until(lambda: bool(d1.requests() or d2.requests()))
            hung, other = (d1, d2) if d1.requests() else (d2, d1)
            other.script = p.script = None
            hung.is_hanging = True
            registry, poller = routed.dispatcher.registry, routed.dispatcher.poller

            def have_answered(*fakes):
                signs = {entry["url"]: entry["last_sign_s"] for entry in registry.stats()}
                return all(signs[fake.url] == 0 for fake in fakes)

            for _ in range(5):
                assert not task.done()
                now_s += LOST_S / 4
                for fake in (p, other):
                    poller.wake(fake.url)
                await until(lambda: have_answered(p, other))
                routed.dispatcher.on_change(registry.sweep())
            response = await task
            assert response.status_code == 200, response.text
            assert routed.dispatcher.num_retries == 1
            await until(lambda: hung.requests()[0].is_closed)
            hung.is_hanging = False
            await routed.pairs_proven(2)

    run(check())
