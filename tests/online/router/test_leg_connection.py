"""HTTP of legs against servers that behave well, oddly, and badly."""

import asyncio
import contextlib
import time

import pytest

from inferkit.core.messages import Generate, Output, encode
from inferkit.core.request import FinishReason
from inferkit.core.sampling_params import SamplingParams
from inferkit.online.facts import InstanceFacts, Side
from inferkit.online.leg_frames import pack_frame
from inferkit.online.router.leg_client import KEEP_ALIVE_S, LegClient, LegFailed
from inferkit.online.router.leg_connection import ConnectionBroken, LegConnection
from inferkit.online.router.routed_request import Fault
from tests.online.router.instances import dead_url, until
from tests.online.serving import run

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MESSAGE = Generate(
    instance_id="router",
    epoch=2,
    peer_epoch=1,
    room=3,
    attempt=4,
    token_ids=[1],
    sampling=SamplingParams(),
    seed=0,
)


def output(**fields):
    header = {"instance_id": "x", "epoch": 1, "peer_epoch": 2, "room": 3, "attempt": 4}
    return encode(Output(**header, **({"index": 0} | fields)))


LAST = pack_frame(output(finish_reason=FinishReason.LENGTH))


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


class Server:
    """Answers each request with the next of these bytes; None = never."""

    def __init__(self, *answers, closes=False):
        self.answers = list(answers)
        self.closes = closes
        self.num_connections = 0
        self.num_closed = 0
        self.requests = []

    @contextlib.asynccontextmanager
    async def serving(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.facts = InstanceFacts(
            url=f"http://127.0.0.1:{self.port}", side=Side.DECODE, instance_id="x", epoch=1
        )
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader, writer):
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(size))
                answer = self.answers.pop(0)
                if answer is not None:
                    writer.write(answer)
                    await writer.drain()
                if self.closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_closed += 1
            writer.close()

    async def read(self, path="/leg"):
        """Status and body by a connection of its own."""
        connection = await LegConnection.open("127.0.0.1", self.port)
        try:
            status = await connection.post("h", path, b"body", {})
            return status, b"".join([piece async for piece in connection.pieces()])
        finally:
            connection.close()


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + chunk(b"ab") + chunk(b"c") + b"0\r\n\r\n",
        CHUNKED + b"3;name=value\r\nabc\r\n0\r\ntrailer: 1\r\n\r\n",
        OK + b"content-length: 3\r\n\r\nabc",
        OK + b"Content-Length:3\r\nX: a:b\r\n\r\nabc",
        OK + b"\r\nabc",
        b"HTTP/1.0 200\r\n\r\nabc",
    ],
)
def test_bodies_of_every_form(answer):
    async def check():
        async with Server(answer, closes=True).serving() as server:
            assert await server.read() == (200, b"abc")
            (request,) = server.requests
            assert request.startswith(b"POST /leg HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n")
            assert request.endswith(b"\r\n\r\nbody")

    run(check())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"x" * 200_000,
        CHUNKED + b"zz\r\n",
        CHUNKED + b"-2\r\n",
        CHUNKED + b"ffffffff\r\n",
        CHUNKED + chunk(b"ab"),
        CHUNKED + b"5\r\nab",
        OK + b"content-length: 5\r\n\r\nab",
        OK + b"content-length: x\r\n\r\nab",
    ],
)
def test_what_is_no_answer_is_a_broken_connection(answer):
    async def check():
        async with Server(answer, closes=True).serving() as server:
            with pytest.raises(ConnectionBroken):
                await server.read()

    run(check())


def test_nobody_listens():
    async def check():
        facts = InstanceFacts(url=dead_url(), side=Side.DECODE, instance_id="x", epoch=1)
        with pytest.raises(LegFailed, match="refused") as caught:
            await anext(LegClient(clock=time.monotonic).outputs(facts, MESSAGE))
        assert caught.value.failure.fault is Fault.BROKEN

    run(check())


async def legs(client, server, count):
    return [[o async for o in client.outputs(server.facts, MESSAGE)] for _ in range(count)]


def test_a_connection_is_used_again_for_a_while():
    async def check():
        now_s = 0.0
        client = LegClient(clock=lambda: now_s)
        answer = CHUNKED + chunk(LAST) + b"0\r\n\r\n"
        async with Server(*[answer] * 4).serving() as server:
            assert [len(outputs) for outputs in await legs(client, server, 3)] == [1, 1, 1]
            assert server.num_connections == 1
            now_s += KEEP_ALIVE_S
            await legs(client, server, 1)
            assert server.num_connections == 2
            await until(lambda: server.num_closed == 1)
            client.close()
            await until(lambda: server.num_closed == 2)

    run(check())


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(LAST),
        CHUNKED + chunk(LAST) + b"0\r\n\r\n",
        OK + b"\r\n" + LAST,
    ],
)
def test_a_connection_that_the_server_closes_is_not_used_again(answer):
    async def check():
        client = LegClient(clock=time.monotonic)
        async with Server(answer, answer, closes=True).serving() as server:
            for count in range(2):
                assert len((await legs(client, server, 1))[0]) == 1
                await until(lambda count=count: server.num_closed == count + 1)
                await asyncio.sleep(0.01)
            assert server.num_connections == 2
        client.close()

    run(check())


def test_frames_may_be_cut_anywhere_and_come_together():
    async def check():
        frames = [pack_frame(output(index=i, token_ids=[i])) for i in range(5)]
        data = b"".join(frames) + LAST
        cut = b"".join(chunk(data[i : i + 7]) for i in range(0, len(data), 7))
        client = LegClient(clock=time.monotonic)
        answers = [CHUNKED + cut + b"0\r\n\r\n", CHUNKED + chunk(data) + b"0\r\n\r\n"]
        async with Server(*answers).serving() as server:
            for outputs in await legs(client, server, 2):
                assert [o.token_ids for o in outputs] == [[0], [1], [2], [3], [4], []]
        client.close()

    run(check())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (CHUNKED + chunk(pack_frame(output(token_ids=[1]))) + b"0\r\n\r\n", "without an end"),
        (CHUNKED + chunk(pack_frame(output(token_ids=[1]))[:-1]) + b"0\r\n\r\n", "without an end"),
        (CHUNKED + chunk(b"\xff" * 8) + b"0\r\n\r\n", "allowed are"),
        (CHUNKED + chunk(pack_frame(b"\xc1")) + b"0\r\n\r\n", "nonsense"),
        (b"HTTP/1.1 502 no\r\ncontent-length: 4\r\n\r\noops", "HTTP status 502: oops"),
        (b"HTTP/1.1 503 no\r\ncontent-length: 2\r\n\r\n[]", r"\[\]"),
        (b"HTTP/1.1 500 no\r\n\r\n" + b"x" * 100_000, "refusal has no end"),
    ],
)
def test_a_leg_without_its_end_has_failed(answer, words):
    async def check():
        client = LegClient(clock=time.monotonic)
        async with Server(answer).serving() as server:
            with pytest.raises(LegFailed, match=words):
                await legs(client, server, 1)
            assert client.num_open == 0
            client.close()
            await until(lambda: server.num_closed == 1)

    run(check())


@pytest.mark.parametrize("delay_s", [0.0, 0.0005, 0.001, 0.002, 0.005, 0.02])
def test_a_leg_that_is_cancelled_at_any_moment_closes_its_connection(delay_s):
    async def check():
        client = LegClient(clock=time.monotonic)
        async with Server(*[None, CHUNKED + chunk(pack_frame(output()))] * 20).serving() as server:
            for _ in range(10):
                task = asyncio.create_task(legs(client, server, 1))
                await asyncio.sleep(delay_s)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert client.num_open == 0
            await until(lambda: server.num_closed == server.num_connections)
            assert not any(client._idle.values())

    run(check())
