"""The instance's side: which legs it takes, what it answers, and when a request ends."""

import asyncio
import contextlib
import random
import time

import httpx
import pytest

from inferkit.core.listening import listening
from inferkit.core.messages import Abort, Generate, Output, encode
from inferkit.core.request import FinishReason, Pair
from inferkit.core.sampling_params import SamplingParams
from inferkit.loader.byte_tokenizer import make_byte_tokenizer
from inferkit.online.errors import GenerationFailed, ServiceError
from inferkit.online.facts import InstanceFacts, Side, read_facts
from inferkit.online.http_server import http_server
from inferkit.online.instance import Instance
from inferkit.online.leg_frames import MAX_FRAME_BYTES, FrameError, FrameReader, pack_frame
from inferkit.online.leg_role import LegRole, LegSide
from inferkit.online.legs import read_leg
from inferkit.online.router.leg_client import LegClient, LegFailed
from inferkit.online.router.routed_request import Fault
from inferkit.online.router_signature import RouterSignatures
from inferkit.online.runner import url_of
from inferkit.online.service import GenerationService, ServedModel
from tests.online.router.instances import FakeInstance, dead_url, router_of, until
from tests.online.serving import VOCAB_SIZE, EchoWorker, dispatching, run

BOOTSTRAP_URL = "http://127.0.0.1:18800"
ROUTER = Instance.draw("router")
MAX_TOKENS = 4


class Leg:
    """A real instance with workers that echo, and a router's client."""

    def __init__(self, side, client, http, service, workers, legs):
        self.side = side
        self.client = client
        self.http = http
        self.service = service
        self.workers = workers
        self.legs = legs

    @property
    def facts(self):
        return self.legs.facts()

    def message(self, *, max_tokens=MAX_TOKENS, num_prompt=3, **fields):
        own = (self.facts.instance_id, self.facts.epoch)
        other = ("other", 5)
        first, second = (own, other) if self.side is Side.PREFILL else (other, own)
        pair = Pair(
            prefill_id=first[0],
            prefill_epoch=first[1],
            decode_id=second[0],
            decode_epoch=second[1],
            bootstrap_url=fields.pop("bootstrap_url", BOOTSTRAP_URL),
        )
        values = {
            "instance_id": ROUTER.instance_id,
            "epoch": ROUTER.epoch,
            "peer_epoch": self.facts.epoch,
            "room": 8,
            "attempt": 77,
            "remaining_ms": 60_000,
            "token_ids": list(range(num_prompt)),
            "sampling": SamplingParams(temperature=0.0, max_tokens=max_tokens),
            "seed": 3,
            "pair": pair,
        }
        return Generate(**(values | fields))

    async def outputs(self, **fields):
        return [o async for o in self.client.outputs(self.facts, self.message(**fields))]

    async def failure(self, **fields):
        with pytest.raises(LegFailed) as caught:
            await self.outputs(**fields)
        return caught.value.failure

    def received(self, kind=Generate):
        found = [message for worker in self.workers for message in worker.received]
        return [message for message in found if isinstance(message, kind)]


@contextlib.asynccontextmanager
async def leg(
    side=Side.DECODE,
    *,
    dp_size=1,
    router_url=None,
    urls=(BOOTSTRAP_URL,),
    secret=b"",
    **worker,
):
    async with dispatching(dp_size) as (dispatcher, parent, context):
        service = GenerationService(
            dispatcher=dispatcher,
            tokenizer=make_byte_tokenizer(VOCAB_SIZE),
            model=ServedModel(name="echo", path=None, vocab_size=VOCAB_SIZE, max_model_len=100),
        )
        workers = [EchoWorker(context, parent, dp_rank=rank, **worker) for rank in range(dp_size)]
        with listening("127.0.0.1", 0) as listener:
            role = LegRole(
                side=side,
                url=url_of(listener),
                bootstrap_url=BOOTSTRAP_URL if side is Side.PREFILL else "",
                bootstrap_urls=urls,
                router_url=router_url,
                secret=secret,
            )
            legs = LegSide(
                role,
                instance=dispatcher.instance,
                dispatcher=dispatcher,
                service=service,
                model="echo",
            )
            client = LegClient(clock=time.monotonic, signatures=RouterSignatures(secret))
            app = legs.app({"role": str(side)})
            options = {"base_url": role.url, "trust_env": False, "verify": False}
            async with (
                http_server(app, listener),
                httpx.AsyncClient(**options) as http,
                legs,
            ):
                assert (await http.get("/ready")).status_code == 503
                for entry in workers:
                    entry.start()
                await service.probe()
                legs.on_change()
                try:
                    yield Leg(side, client, http, service, workers, legs)
                finally:
                    client.close()
                    for entry in workers:
                        entry.stop()
        service.close()


# -- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", list(Side))
def test_a_leg_is_a_stream_of_outputs_for_its_router(side):
    async def check():
        async with leg(side) as tried:
            outputs = await tried.outputs(request_id="mine", sample_index=2)
            assert [output.token_ids for output in outputs] == [[0], [1], [2], [0]]
            assert [output.finish_reason for output in outputs] == [None] * 3 + ["length"]
            for output in outputs:
                assert output.key == (8, 77)
                assert (output.epoch, output.peer_epoch) == (tried.facts.epoch, ROUTER.epoch)
            (message,) = tried.received()
            sent = tried.message()
            assert message.pair == sent.pair and message.key == (8, 77)
            assert (message.request_id, message.sample_index, message.seed) == ("mine", 2, 3)
            assert 0 < message.remaining_ms <= 60_000

    run(check())


def test_one_connection_serves_many_legs_one_after_the_other():
    async def check():
        async with leg() as tried:
            for attempt in range(5):
                assert len(await tried.outputs(attempt=attempt)) == MAX_TOKENS
            (connections,) = tried.client._idle.values()
            assert len(connections) == 1

    run(check())


def test_prefill_computes_a_room_on_the_rank_that_decode_expects():
    async def check():
        async with leg(Side.PREFILL, dp_size=3) as tried:
            for room in (3, 4, 5, 3001):
                await tried.outputs(room=room)
            ranks = {
                message.room: worker.dp_rank
                for worker in tried.workers
                for message in worker.received
            }
            assert ranks == {3: 0, 4: 1, 5: 2, 3001: 1}

    run(check())


def test_decode_computes_a_room_where_there_is_least_to_do():
    async def check():
        async with leg(Side.DECODE, dp_size=2, tick_s=0.01) as tried:
            await asyncio.gather(*(tried.outputs(room=4, attempt=n) for n in range(4)))
            assert [len(worker.received) for worker in tried.workers] == [2, 2]

    run(check())


# -- legs that are not taken ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "fault", "words"),
    [
        ({"peer_epoch": 1}, Fault.AWAY, "in another life"),
        ({"pair": None}, Fault.REFUSED, "pair: it is missing"),
        ({"room": 0}, Fault.REFUSED, "room=0 belongs to no request"),
        ({"bootstrap_url": "http://evil:1"}, Fault.AWAY, "bootstrap_url='http://evil:1' belongs"),
        ({"protocol_version": 9}, Fault.BROKEN, "speaks protocol_version=9, this instance 1"),
        ({"token_ids": [-1]}, Fault.REFUSED, "at `$.token_ids[0]`"),
        ({"num_prompt": 60}, Fault.REFUSED, "60 tokens do not fit"),
    ],
)
def test_what_is_not_taken_is_told_at_once(fields, fault, words):
    async def check():
        async with leg() as tried:
            if "num_prompt" in fields:
                (output,) = await tried.outputs(**fields)
                assert output.finish_reason is FinishReason.REFUSED
                assert words in output.finish_detail
                return
            failure = await tried.failure(**fields)
            assert (failure.fault, words in failure.detail) == (fault, True), failure
            assert not tried.received()

    run(check())


def test_a_pair_of_another_life_is_not_ours():
    async def check():
        async with leg(Side.PREFILL) as tried:
            message = tried.message()
            pair = Pair(
                prefill_id="prefill-x",
                prefill_epoch=message.pair.prefill_epoch,
                decode_id="d",
                decode_epoch=1,
                bootstrap_url=BOOTSTRAP_URL,
            )
            failure = await tried.failure(pair=pair)
            assert failure.fault is Fault.AWAY and "the request is for prefill-x" in failure.detail

    run(check())


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"{}", b"\x90" * 5000, encode(Abort(instance_id="x", epoch=1, peer_epoch=1))],
)
def test_what_is_no_leg_is_refused_and_harms_nobody(body):
    async def check():
        async with leg() as tried:
            response = await tried.http.post("/leg", content=body)
            assert response.status_code == 400
            assert "the leg is malformed" in response.json()["error"]["message"]
            assert len(await tried.outputs()) == MAX_TOKENS

    run(check())


def test_no_bytes_harm_an_instance():
    draw = random.Random(3)

    async def check():
        async with leg(Side.PREFILL) as tried:
            good = encode(tried.message())
            assert read_leg(good) == tried.message()
            for _ in range(300):
                body = bytearray(good)
                for _ in range(draw.randint(1, 4)):
                    place = draw.randrange(len(body))
                    if draw.random() < 0.3:
                        del body[place : place + draw.randint(1, 5)]
                    else:
                        body[place] = draw.randrange(256)
                try:
                    read_leg(bytes(body))
                except ServiceError as error:
                    assert error.status in (400, 500)
                    if draw.random() < 0.1:
                        response = await tried.http.post("/leg", content=bytes(body))
                        assert response.status_code == error.status
            assert len(await tried.outputs()) == MAX_TOKENS

    run(check())


def test_an_attempt_that_runs_is_not_run_twice():
    async def check():
        async with leg(tick_s=0.02) as tried:
            first = asyncio.create_task(tried.outputs(max_tokens=20))
            await until(lambda: bool(tried.received()))
            failure = await tried.failure()
            assert failure.fault is Fault.CONFLICT and "runs already" in failure.detail
            assert len(await first) == 20
            assert len(await tried.outputs()) == MAX_TOKENS

    run(check())


def test_while_it_drains_no_leg_is_taken_and_those_that_run_end_well():
    async def check():
        async with leg(tick_s=0.01) as tried:
            running = asyncio.create_task(tried.outputs(max_tokens=20))
            await until(lambda: bool(tried.received()))
            tried.service.drain()
            failure = await tried.failure(attempt=78)
            assert failure.fault is Fault.AWAY and "shutting down" in failure.detail
            assert await tried.service.drained(20)
            assert len(await running) == 20

    run(check())


# -- ends ----------------------------------------------------------------------------------------


def test_closing_the_connection_aborts_the_request():
    async def check():
        async with leg(tick_s=0.01) as tried:
            task = asyncio.create_task(tried.outputs(max_tokens=10_000))
            await until(lambda: bool(tried.received()))
            begin_s = time.perf_counter()
            task.cancel()
            await until(lambda: bool(tried.received(Abort)))
            assert time.perf_counter() - begin_s < 5
            assert tried.received(Abort)[0].key == (8, 77)
            assert tried.service.dispatcher.num_running == 0

    run(check())


def test_ranks_that_die_end_the_leg_with_a_reason_to_try_elsewhere():
    async def check():
        async with leg(tick_s=0.01) as tried:
            outputs = tried.client.outputs(tried.facts, tried.message(max_tokens=10_000))
            await anext(outputs)
            tried.service.dispatcher.fail(GenerationFailed("rank 1 was killed"))
            last = [output async for output in outputs][-1]
            assert last.finish_reason is FinishReason.UNAVAILABLE
            assert last.finish_detail == "rank 1 was killed"
            failure = await tried.failure(attempt=78)
            assert failure.fault is Fault.UNAVAILABLE

    run(check())


# -- what it says of itself ----------------------------------------------------------------------


@pytest.mark.parametrize("side", list(Side))
def test_health_says_what_it_is_and_clients_are_sent_to_the_router(side):
    async def check():
        async with leg(side) as tried:
            health = (await tried.http.get("/health")).json()
            assert health["status"] == "ok" and read_facts(health) == tried.facts
            assert tried.facts.state == "ready" and tried.facts.side is side
            assert (await tried.http.get("/ready")).json() == {"status": "ready"}
            stats = (await tried.http.get("/stats")).json()
            assert stats["role"] == side and len(stats["dp_ranks"]) == 1
            for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/abort"):
                response = await tried.http.post(path, json={"prompt": "x"})
                assert response.status_code == 400
                text = response.json()["error"]["message"]
                assert f"this {side} instance computes one half of requests" in text
            tried.service.drain()
            assert (await tried.http.get("/health")).json()["state"] == "draining"

    run(check())


def test_it_joins_its_router_and_leaves_it():
    async def check():
        prefill = FakeInstance(Side.PREFILL)
        async with prefill, router_of(proven=0) as routed:
            async with leg(Side.DECODE, router_url=routed.url, urls=()) as tried:
                registry = routed.dispatcher.registry
                await until(lambda: registry.is_usable(tried.facts.url))
                response = await tried.http.post("/generate", json={"prompt": "x"})
                assert f"the router at {routed.url}" in response.text
                # A prefill instance that joins now is known to decode when a request comes.
                routed.dispatcher.join(prefill.facts)
                await routed.pairs_proven(1)
                answer = (await routed.generate("ab")).json()
                assert answer["output"] == "abab"
            await until(lambda: tried.facts.url not in registry.urls)

    run(check())


def test_with_a_secret_only_its_owners_send_legs_and_join():
    async def check():
        async with router_of(proven=0, secret=b"ours") as routed:
            body = FakeInstance(Side.PREFILL, url="http://127.0.0.1:1").facts.to_json()
            response = await routed.client.post("/instances", json=body)
            assert response.status_code == 401
            assert "disagg.secret_env" in response.json()["error"]["message"]
            left = await routed.client.delete("/instances/decode-1")
            assert left.status_code == 401
            async with leg(Side.DECODE, router_url=routed.url, secret=b"ours") as tried:
                registry = routed.dispatcher.registry
                await until(lambda: registry.is_usable(tried.facts.url))
                assert len(await tried.outputs()) == MAX_TOKENS
                tried.client.signatures = RouterSignatures(b"theirs")
                failure = await tried.failure()
                assert failure.fault is Fault.BROKEN and "HTTP status 401" in failure.detail
                assert len(tried.received()) == 1
            assert registry.urls == [], "it has left"

    run(check())


def test_a_router_that_is_not_there_yet_is_joined_when_it_comes():
    async def check():
        async with leg(Side.PREFILL, router_url=dead_url()) as tried:
            await until(lambda: bool(tried.legs.link.trouble))
            assert len(await tried.outputs()) == MAX_TOKENS, "it works without"
            async with router_of(proven=0) as routed:
                tried.legs.link.router_url = routed.url
                await until(lambda: routed.dispatcher.registry.is_usable(tried.facts.url))
                await until(lambda: tried.legs.link.trouble == "")

    run(check())


# -- frames --------------------------------------------------------------------------------------


def test_frames_come_out_as_they_went_in_however_they_are_cut():
    frames = [b"", b"x", b"y" * 1000, b"\x00" * 5]
    data = b"".join(map(pack_frame, frames))
    for size in (1, 2, 3, 7, len(data)):
        reader = FrameReader()
        found = [
            frame
            for start in range(0, len(data), size)
            for frame in reader.feed(data[start : start + size])
        ]
        assert found == frames and reader.is_between_frames
    with pytest.raises(FrameError, match="allowed are"):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


def test_answers_for_another_request_are_a_broken_leg():
    facts = InstanceFacts(url="http://x:1", side=Side.DECODE, instance_id="x", epoch=1)

    async def check():
        client = LegClient(clock=time.monotonic)
        header = {"instance_id": "x", "epoch": 1, "peer_epoch": 2, "room": 3, "attempt": 4}
        message = Generate(
            **header | {"instance_id": "r", "epoch": 2, "peer_epoch": 1},
            token_ids=[1],
            sampling=SamplingParams(),
            seed=0,
        )
        good = Output(**header, index=0)
        assert client._read(encode(good), facts, message) == good
        for name in ("epoch", "peer_epoch", "room", "attempt"):
            wrong = Output(**header | {name: 9}, index=0)
            with pytest.raises(LegFailed, match="for another request"):
                client._read(encode(wrong), facts, message)
        with pytest.raises(LegFailed, match="nonsense"):
            client._read(b"\xc1", facts, message)
        client.close()

    run(check())
