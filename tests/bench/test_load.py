"""The parts of a load: which requests, when, how answers are read, what is counted."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from inferkit.bench.load.client import LoadClient, Outcome
from inferkit.bench.load.metrics import collect_load_metrics
from inferkit.bench.load.summary import load_table, warnings
from inferkit.bench.load.workload import arrivals, make_requests
from inferkit.core.errors import WorkerError

NUM_REQUESTS = 200
LENGTHS = {"prompt_len": 5, "output_len": 3, "vocab_size": 1000}


def tokens(*ids: int, reason: str | None = None) -> bytes:
    return b"data: " + json.dumps({"output_ids": ids, "finish_reason": reason}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE, END = b"data: [DONE]\n\n", chunk(b"")


class Server:
    """Answers requests on a socket, each with the pieces of one script, a moment apart."""

    def __init__(self, *scripts: list[bytes], pause_s: float = 0.01) -> None:
        self.scripts = list(scripts)
        self.pause_s = pause_s
        self.bodies: list[dict] = []
        self.num_open = self.max_open = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            )
            self.bodies.append(json.loads(await reader.readexactly(length)))
            self.num_open += 1
            self.max_open = max(self.max_open, self.num_open)
            script = self.scripts[(len(self.bodies) - 1) % len(self.scripts)]
            for piece in script:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(self.pause_s)
            self.num_open -= 1
            if script[-1] != END:
                break


def loaded(server: Server, test: Callable[[LoadClient], Awaitable[list[Outcome]]]) -> list[Outcome]:
    """What `test` returns, with a client of `server`."""

    connections: list[asyncio.Task[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        try:
            await server.answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            await writer.wait_closed()

    async def run() -> list[Outcome]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            async with LoadClient(f"http://127.0.0.1:{port}", timeout_s=20) as client:
                outcomes = await test(client)
            await asyncio.gather(*connections)
        return outcomes

    return asyncio.run(run())


def test_equal_seeds_give_equal_requests_and_others_differ():
    first = make_requests(NUM_REQUESTS, **LENGTHS, seed=3, rate=10.0)
    assert first == make_requests(NUM_REQUESTS, **LENGTHS, seed=3, rate=10.0)
    assert len({tuple(request.prompt_token_ids[:3]) for request in first}) == NUM_REQUESTS
    assert {len(request.prompt_token_ids) for request in first} == {5}
    assert len({request.seed for request in first}) == NUM_REQUESTS
    assert all(0 <= token < 1000 for request in first for token in request.prompt_token_ids)


def test_prompts_do_not_depend_on_the_rate():
    with_rate = make_requests(4, **LENGTHS, seed=0, rate=2.0)
    without = make_requests(4, **LENGTHS, seed=0)
    assert [r.prompt_token_ids for r in with_rate] == [r.prompt_token_ids for r in without]
    assert [r.due_s for r in without] == [0.0] * 4


def test_arrivals_rise_from_zero_at_the_rate_that_was_asked_for():
    times = arrivals(2001, rate=50.0, seed=1)
    assert times[0] == 0.0 and list(times) == sorted(times)
    # The mean of 2000 exponential gaps is within 10 % of 1/50 but for one time in 10^5.
    assert times[-1] / 2000 == pytest.approx(1 / 50, rel=0.1)


def test_an_answer_is_read_whatever_pieces_it_comes_in():
    stream = tokens(7) + tokens(8) + tokens(9, reason="length") + DONE
    cut = len(tokens(7)) + 9
    script = [HEAD, chunk(stream[:cut]), chunk(stream[cut:]), END]

    async def test(client: LoadClient) -> list[Outcome]:
        return await client.put(make_requests(2, **LENGTHS, seed=0), concurrency=1)

    server = Server(script)
    outcomes = loaded(server, test)
    for outcome in outcomes:
        assert (outcome.error, outcome.finish_reason) == (None, "length")
        assert outcome.token_ids == [7, 8, 9]
        assert 0 < outcome.ttft_s < outcome.e2e_s
        assert outcome.tpot_s == pytest.approx((outcome.e2e_s - outcome.ttft_s) / 2)
    assert server.bodies[0]["ignore_eos"] and server.bodies[0]["max_tokens"] == 3
    assert [len(body["prompt"]) for body in server.bodies] == [5, 5]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([HEAD, chunk(tokens(1) + tokens(2)), END], "the stream ended before the answer did"),
        (
            [HEAD, chunk(tokens(1, reason="abort") + DONE), END],
            r"1 tokens came instead of 3 \(abort\)",
        ),
        (
            [HEAD, chunk(tokens(1)), chunk(b'data: {"error": {"message": "rank 0 died"}}\n\n')],
            "rank 0 died",
        ),
        ([HEAD, chunk(tokens(1))], "RemoteProtocolError: peer closed connection"),
        (
            [b'HTTP/1.1 503 No\r\ncontent-length: 35\r\n\r\n{"error": {"message": "no decode"}}'],
            "503: no decode",
        ),
    ],
)
def test_an_answer_that_is_not_whole_has_failed_and_says_why(script, error):
    async def test(client: LoadClient) -> list[Outcome]:
        return await client.put(make_requests(1, **LENGTHS, seed=0), concurrency=1)

    (outcome,) = loaded(Server(script), test)
    assert outcome.finish_reason == "failed" and not outcome.is_ok
    with pytest.raises(WorkerError, match=error):
        raise WorkerError(outcome.error)


def test_concurrency_bounds_what_is_in_flight_and_a_rate_does_not():
    script = [HEAD, chunk(tokens(1, 2, 3, reason="length") + DONE), END]

    async def closed(client: LoadClient) -> list[Outcome]:
        return await client.put(make_requests(12, **LENGTHS, seed=0), concurrency=3)

    async def with_rate(client: LoadClient) -> list[Outcome]:
        requests = make_requests(12, **LENGTHS, seed=0, rate=200.0)
        return await client.put(requests, concurrency=None)

    server = Server(script, pause_s=0.05)
    assert [outcome.request_id for outcome in loaded(server, closed)] == list(range(12))
    assert server.max_open == 3
    server = Server(script, pause_s=0.2)
    outcomes = loaded(server, with_rate)
    assert server.max_open > 6
    assert all(outcome.sent_s >= outcome.due_s for outcome in outcomes)


def outcome(number: int, **changed) -> Outcome:
    times = {"sent_s": float(number), "ttft_s": 0.5, "tpot_s": 0.25, "e2e_s": 1.0}
    return Outcome(
        request_id=number,
        num_prompt_tokens=10,
        **{"token_ids": [1, 2, 3], "finish_reason": "length"} | times | changed,
    )


def test_metrics_leave_failed_requests_out_of_the_figures():
    outcomes = [
        outcome(0),
        outcome(1, ttft_s=1.5, e2e_s=3.0),
        outcome(2, error="503: x", finish_reason="failed", token_ids=[], ttft_s=None, e2e_s=None),
    ]
    metrics = collect_load_metrics(
        outcomes, has_rate=False, load_time_s=9.0, client_cpu_s=1.0, num_devices=4
    )
    assert (metrics["num_requests"], metrics["num_failed"]) == (3, 1)
    assert metrics["finish_reasons"] == {"length": 2, "failed": 1}
    assert metrics["wall_time_s"] == 4.0
    assert metrics["request_per_s"] == 0.5
    assert metrics["output_tokens_per_s"] == 1.5 and metrics["total_tokens_per_s"] == 6.5
    assert metrics["ttft_s"]["num"] == 2 and metrics["ttft_s"]["mean"] == 1.0
    assert metrics["send_delay_s"]["num"] == 0 and metrics["num_devices"] == 4
    assert metrics["client_cpu_share"] == 0.25
    (warning,) = warnings(metrics, outcomes)
    assert warning.startswith("1 of 3 requests failed; the first: 503: x")
    assert load_table(metrics, "3 requests").row_count == 9


def test_a_client_that_is_too_slow_is_named():
    outcomes = [outcome(number, due_s=number - 0.3) for number in range(4)]
    metrics = collect_load_metrics(
        outcomes, has_rate=True, load_time_s=1.0, client_cpu_s=0.1, num_devices=1
    )
    assert metrics["send_delay_s"]["mean"] == pytest.approx(0.3)
    (warning,) = warnings(metrics, outcomes)
    assert "sent 300 ms late" in warning


def test_a_client_that_had_no_time_left_is_named():
    metrics = collect_load_metrics(
        [outcome(0)], has_rate=False, load_time_s=1.0, client_cpu_s=0.9, num_devices=1
    )
    (warning,) = warnings(metrics, [outcome(0)])
    assert "busy for 90 % of the time" in warning
