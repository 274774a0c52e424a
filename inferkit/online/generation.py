"""One generation while it runs: outputs of a worker become pieces of text."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inferkit.core.messages import Output
from inferkit.core.request import FinishReason, Request, TokenLogprobs
from inferkit.online.errors import (
    BadRequest,
    GenerationFailed,
    RoomInUse,
    TimeOver,
    Unavailable,
)
from inferkit.online.work import Stream

if TYPE_CHECKING:
    from inferkit.online.service import GenerationService


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one token, or the end, adds."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None = None


class Generation:
    """One of the generations of a call. Consume `pieces` to its end, or `cancel`."""

    def __init__(
        self,
        *,
        index: int,
        request: Request,
        stream: Stream,
        service: "GenerationService",
        is_streamed: bool,
        deadline_s: float,
    ) -> None:
        self.index = index
        """Position among the generations of the call."""
        self.request = request
        """With the output so far; times are of the service's clock."""
        self.is_streamed = is_streamed
        self.text = ""
        """The whole text, once it is over; pieces have text only where it is streamed."""
        self._stream = stream
        self._service = service
        self._deadline_s = deadline_s

    @property
    def room(self) -> int:
        return self._stream.key[0]

    @property
    def is_over(self) -> bool:
        return self.request.finish_reason is not None

    async def pieces(self) -> AsyncIterator[Piece]:
        """One piece per token, the last one with the finish reason.

        Raises:
            ServiceError: it is refused, or cannot go on.
        """
        try:
            while not self.is_over:
                for piece in self._take(await self._next()):
                    yield piece
        finally:
            self.cancel("the client is gone")

    def abort(self, reason: str) -> None:
        """Let it end as it is; `pieces` goes on to the end."""
        self._stream.abort(reason)

    def cancel(self, reason: str) -> None:
        """Free what it holds, here and in the worker; nothing where it is over."""
        self._stream.cancel(reason)
        self._service.forget(self)

    async def _next(self) -> Output:
        left_s = self._deadline_s - self._service.clock()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                return await anext(self._stream)
        except TimeoutError:
            raise TimeOver("the request has used up its time") from None
        except StopAsyncIteration:
            raise GenerationFailed("the generation has no end") from None

    def _take(self, output: Output) -> list[Piece]:
        """Pieces of one message, which may hold several tokens."""
        request, processor = self.request, self._service.processor
        self._check(output)
        request.num_cached_tokens = output.num_cached_tokens
        pieces = []
        now_s = self._service.clock()
        for position, token_id in enumerate(output.token_ids):
            logprobs = output.logprobs[position : position + 1]
            request.output_token_ids.append(token_id)
            request.output_logprobs += logprobs
            request.token_times_s.append(now_s)
            if processor.process(request.request_id, [token_id]):
                self._stream.cancel("a stop string is complete")
                request.finish_reason = FinishReason.STOP
            text = processor.delta(request.request_id) if self.is_streamed else ""
            pieces.append(Piece(text=text, token_ids=[token_id], logprobs=logprobs))
            if self.is_over:
                break
        if output.finish_reason is not None and not self.is_over:
            request.finish_reason = output.finish_reason
        if self.is_over:
            request.finish_time_s = now_s
            pieces = self._with_end(pieces)
        return pieces

    def _with_end(self, pieces: list[Piece]) -> list[Piece]:
        """The last piece has the rest of the text and the reason."""
        request, processor = self.request, self._service.processor
        last = pieces.pop() if pieces else Piece(text="", token_ids=[], logprobs=[])
        self.text = processor.text(request)
        rest = processor.finish(request.request_id) if self.is_streamed else ""
        text = last.text + rest
        return [*pieces, replace(last, text=text, finish_reason=request.finish_reason)]

    def _check(self, output: Output) -> None:
        if output.finish_reason in (FinishReason.REFUSED, FinishReason.PROMPT_TOO_LONG):
            raise BadRequest(output.finish_detail, param="prompt")
        if output.finish_reason is FinishReason.CONFLICT:
            raise RoomInUse(output.finish_detail)
        if output.finish_reason is FinishReason.UNAVAILABLE:
            raise Unavailable(output.finish_detail)
        if output.index != len(self.request.output_token_ids):
            raise GenerationFailed(
                f"token {output.index} came where {len(self.request.output_token_ids)} was due"
            )
