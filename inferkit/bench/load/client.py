"""The client of a load: streams answers of /generate and takes the times that a user would see.

    ttft_s   first token of the answer - when the request was sent
    tpot_s   (last token - first token) / (tokens - 1); None with one token
    e2e_s    last token - when the request was sent

Tokens that arrive in one piece have the time of that piece.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from inferkit.bench.load.workload import LoadRequest
from inferkit.core.errors import WorkerError

FAILED = "failed"
"""The finish reason of a request without a whole answer."""
DATA, DONE = b"data: ", b"data: [DONE]"
MAX_ERROR_LEN = 300
PROVEN = "closed"
"""State of the breaker of a pair that has generated."""
STATS_INTERVAL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one request; a line of requests.jsonl. Times are seconds."""

    request_id: int
    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    """Of the answer; where it broke off, those that came."""
    finish_reason: str = FAILED
    error: str | None = None
    """Why there is no whole answer."""
    due_s: float = 0.0
    """From the beginning of the load to when it was to be sent."""
    sent_s: float = 0.0
    """From the beginning of the load to when it was sent; much later than due, and this client was
    too slow for the load."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None


OnOutcome = Callable[[Outcome], None]
OnSent = Callable[[LoadRequest], None]


class LoadClient:
    """Connections to one service, kept between requests.

    Args:
        timeout_s: silence of the service after which a request has failed.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url = url
        # The environment's proxies are for other hosts than the one that was just started here.
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
            verify=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def vocab_size(self) -> int:
        """Of the model that is served.

        Raises:
            WorkerError: the service does not tell.
        """
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            return int(answer.json()["data"][0]["vocab_size"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            raise WorkerError(f"{self.url}/v1/models does not tell its model: {error!r}") from error

    async def until_all_pairs(self, num_pairs: int) -> None:
        """Returns when each prefill instance of a cluster has handed over to each decode instance;
        a router is ready with the first pair.

        Raises:
            WorkerError: the router does not tell.
        """
        while True:
            try:
                answer = await self._http.get("/stats")
                answer.raise_for_status()
                pairs = answer.json()["pairs"]
            except (httpx.HTTPError, ValueError, KeyError) as error:
                raise WorkerError(f"{self.url}/stats tells no pairs: {error!r}") from error
            if sum(pair["breaker"] == PROVEN for pair in pairs) >= num_pairs:
                return
            await asyncio.sleep(STATS_INTERVAL_S)

    async def put(
        self,
        requests: Sequence[LoadRequest],
        *,
        concurrency: int | None,
        on_sent: OnSent = lambda request: None,
        on_outcome: OnOutcome = lambda outcome: None,
    ) -> list[Outcome]:
        """Send all requests; returns what became of each, in their order.

        Args:
            concurrency: so many are in flight, as long as there are more; None = each is sent when
                it is due, however many are.
        """
        outcomes: dict[int, Outcome] = {}
        start_s = time.perf_counter()

        async def one(request: LoadRequest) -> None:
            on_sent(request)
            outcome = await self._ask(request, start_s)
            outcomes[request.request_id] = outcome
            on_outcome(outcome)

        async with asyncio.TaskGroup() as group:
            if concurrency is None:
                for request in requests:
                    await asyncio.sleep(start_s + request.due_s - time.perf_counter())
                    group.create_task(one(request))
            else:
                waiting = iter(requests)
                for _ in range(concurrency):
                    group.create_task(_one_after_another(waiting, one))
        return [outcomes[request.request_id] for request in requests]

    async def _ask(self, request: LoadRequest, start_s: float) -> Outcome:
        """Stream one answer; whatever goes wrong is its outcome."""
        body = {
            "prompt": request.prompt_token_ids,
            "max_tokens": request.output_len,
            "ignore_eos": True,
            "seed": request.seed,
            "stream": True,
        }
        answer = _Answer()
        sent_s = time.perf_counter()
        try:
            async with self._http.stream("POST", "/generate", json=body) as response:
                if response.status_code == httpx.codes.OK:
                    async for data in response.aiter_raw():
                        answer.take(data, time.perf_counter())
                else:
                    answer.error = _error_of(response.status_code, await response.aread())
        except httpx.HTTPError as error:
            # An error event comes before the end of a broken stream and says more.
            answer.error = answer.error or f"{type(error).__name__}: {error}".rstrip(": ")
        times, num_tokens = answer.times_s, len(answer.token_ids)
        problem = answer.problem(request.output_len)
        return Outcome(
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            token_ids=answer.token_ids,
            finish_reason=FAILED if problem else answer.finish_reason,
            error=problem,
            due_s=request.due_s,
            sent_s=sent_s - start_s,
            ttft_s=times[0] - sent_s if times else None,
            tpot_s=(times[-1] - times[0]) / (num_tokens - 1) if num_tokens > 1 else None,
            e2e_s=times[-1] - sent_s if times else None,
        )


class _Answer:
    """Takes the bytes of a stream of events as they come."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.times_s: list[float] = []
        """Of pieces with tokens."""
        self.finish_reason = ""
        self.error: str | None = None
        self._is_whole = False
        self._rest = b""

    def take(self, data: bytes, time_s: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line == DONE:
                self._is_whole = True
            elif line.startswith(DATA):
                self._take_event(json.loads(line.removeprefix(DATA)), time_s)

    def _take_event(self, event: dict[str, Any], time_s: float) -> None:
        if "error" in event:
            self.error = str(event["error"]["message"])
            return
        if event["output_ids"]:
            self.token_ids += event["output_ids"]
            self.times_s.append(time_s)
        self.finish_reason = event["finish_reason"] or self.finish_reason

    def problem(self, output_len: int) -> str | None:
        """Why this is no whole answer of `output_len` tokens."""
        if self.error is not None:
            return self.error[:MAX_ERROR_LEN]
        if not self._is_whole:
            return "the stream ended before the answer did"
        if len(self.token_ids) != output_len:
            given = f"{len(self.token_ids)} tokens came instead of {output_len}"
            return f"{given} ({self.finish_reason})"
        return None


async def _one_after_another(
    waiting: Iterator[LoadRequest], one: Callable[[LoadRequest], Awaitable[None]]
) -> None:
    """One of several that share the requests which wait."""
    for request in waiting:
        await one(request)


def _error_of(status: int, content: bytes) -> str:
    """What an answer that is none says."""
    try:
        return f"{status}: {json.loads(content)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {content.decode('utf-8', 'replace')}"
