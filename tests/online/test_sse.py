"""Streams as they cross a real socket: one write per event, broken ends, clients that leave."""

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator

import pytest
import uvicorn

from inferkit.core.listening import listening
from inferkit.online.api import make_app
from inferkit.online.errors import GenerationFailed
from inferkit.online.http_server import quiet_uvicorn
from inferkit.online.sse import event
from tests.online.serving import run, serving


@contextlib.asynccontextmanager
async def listening_service(**options) -> AsyncIterator[tuple]:
    """A service behind uvicorn on a port of loopback."""
    quiet_uvicorn()
    async with serving(**options) as served:
        with listening("127.0.0.1", 0) as listener:
            app = make_app(served.service, facts={})
            config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
            server = uvicorn.Server(config)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                while not server.started:
                    await asyncio.sleep(0.005)
                yield served, listener.getsockname()[1]
            finally:
                server.should_exit = server.force_exit = True
                await task


async def request(port, path="/v1/completions", **body):
    """Send a request; returns the open connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


async def chunks(reader):
    """Chunks of a chunked body; None last where it ends as it should."""
    while True:
        try:
            size = int(await reader.readuntil(b"\r\n"), 16)
        except asyncio.IncompleteReadError:
            return
        data = await reader.readexactly(size + 2)
        yield data[:-2] if size else None
        if not size:
            return


def test_every_event_is_one_chunk_and_the_body_has_an_end():
    async def check():
        async with listening_service() as (served, port):
            reader, writer = await request(port, prompt="a\u2028b", max_tokens=5, stream=True)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200 OK" in head and b"transfer-encoding: chunked" in head.lower()
            found = [chunk async for chunk in chunks(reader)]
            assert found[-2:] == [b"data: [DONE]\n\n", None]
            for chunk in found[:-2]:
                assert re.fullmatch(rb"data: \{[ -~]*\}\n\n", chunk), chunk
            texts = [json.loads(chunk[6:])["choices"][0]["text"] for chunk in found[:-2]]
            assert "".join(texts) == "a\u2028b"
            writer.close()

    run(check())


def test_each_event_is_written_when_its_token_is_there():
    async def check():
        async with listening_service(tick_s=0.05) as (served, port):
            reader, writer = await request(port, prompt="ab", max_tokens=4, stream=True)
            await reader.readuntil(b"\r\n\r\n")
            times = []
            async for _ in chunks(reader):
                times.append(asyncio.get_running_loop().time())
            gaps = [later - earlier for earlier, later in zip(times[:3], times[1:4], strict=True)]
            assert min(gaps) > 0.02, "several events came together"
            writer.close()

    run(check())


def test_a_stream_that_fails_tells_why_and_has_no_end(caplog):
    async def check():
        async with listening_service(tick_s=0.005) as (served, port):
            reader, writer = await request(port, prompt="ab", max_tokens=190, stream=True)
            await reader.readuntil(b"\r\n\r\n")
            found = []
            async for chunk in chunks(reader):
                found.append(chunk)
                if len(found) == 3:
                    served.dispatcher.fail(GenerationFailed("rank 0 was killed"))
            assert found[-1] is not None, "a clean end would be taken for success"
            error = json.loads(found[-1][6:])["error"]
            assert error == {
                "message": "rank 0 was killed",
                "type": "generation_failed",
                "param": None,
                "code": None,
            }
            assert b"[DONE]" not in b"".join(found)
            writer.close()

    run(check())
    assert "without completing response" not in caplog.text


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_its_requests(streamed, n):
    async def check():
        async with listening_service(tick_s=0.005, dp_size=2) as (served, port):
            reader, writer = await request(port, prompt="ab", max_tokens=190, stream=streamed, n=n)
            if streamed:
                await reader.readuntil(b"\r\n\r\n")
            await served.until(lambda: sum(len(worker.running) for worker in served.workers) == n)
            writer.close()
            await served.until(lambda: not any(worker.running for worker in served.workers))
            assert served.dispatcher.num_running == 0
            reader, writer = await request(port, prompt="ab", max_tokens=2)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            writer.close()

    run(check())


def test_a_client_that_leaves_before_the_first_token_frees_its_request():
    async def check():
        async with listening_service() as (served, port):
            served.workers[0].is_silent = True
            _, writer = await request(port, prompt="ab", max_tokens=9, stream=True)
            await served.until(lambda: bool(served.workers[0].running))
            writer.close()
            await served.until(lambda: served.dispatcher.num_running == 0)

    run(check())


def test_many_clients_that_leave_at_random_leave_nothing_behind():
    async def one(port, rng):
        kind = rng.choice(["whole", "streamed", "n"])
        body = {"prompt": "ab", "max_tokens": rng.randint(1, 150), "stream": kind != "whole"}
        reader, writer = await request(port, n=2 if kind == "n" else 1, **body)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * 0.2):
                while await reader.read(1000):
                    pass
        writer.close()

    async def check():
        async with listening_service(tick_s=0.001, dp_size=2) as (served, port):
            rng = random.Random(5)
            await asyncio.gather(*(one(port, rng) for _ in range(100)))
            await served.until(lambda: not any(worker.running for worker in served.workers))
            service, dispatcher = served.service, served.dispatcher
            await served.until(lambda: not service._generations)
            assert not service._rooms and not service.processor._streams
            assert not service.processor._prompts
            assert dispatcher.num_running == 0
            assert [entry["outstanding_tokens"] for entry in dispatcher.rank_stats()] == [0, 0]

    run(check())


def test_events_are_ascii_and_finite():
    assert event(
        {"text": "\u4f60\u2028\x85"}
    ) == b'data: {"text": "\\u4f60\\u2028\\x85"}\n\n'.replace(b"\\x85", b"\\u0085")
    with pytest.raises(ValueError, match="Out of range float"):
        event({"logprob": float("-inf")})
