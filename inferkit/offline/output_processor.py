"""Turns output tokens into text in the process that has the tokenizer, and finds stop strings."""

from collections.abc import Sequence
from typing import Any

from inferkit.core.request import Request
from inferkit.offline.prompts import Prompt
from inferkit.offline.result import GenerationResult
from inferkit.offline.text_stream import TextStream, decode


class OutputProcessor:
    """Holds the text of requests in flight.

    Tokens are decoded one by one only for requests that have stop strings or are streamed; the
    text of all others is decoded once, at their end. The final text is that of all output tokens
    without special ones, cut before the first stop string; `token_ids` keep the token that
    completed it.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._prompts: dict[int, Prompt] = {}
        self._streams: dict[int, TextStream] = {}

    def add(self, request: Request, prompt: Prompt, *, is_streamed: bool = False) -> None:
        """Expect tokens of a request; call before its first step."""
        self._prompts[request.request_id] = prompt
        if is_streamed or request.sampling.stop:
            sampling = request.sampling
            stream = TextStream(self.tokenizer, sampling.stop, sampling.min_tokens)
            self._streams[request.request_id] = stream

    def process(self, request_id: int, new_token_ids: Sequence[int]) -> bool:
        """Take new tokens; True when they complete a stop string, which ends the request."""
        stream = self._streams.get(request_id)
        return stream is not None and stream.append(new_token_ids)

    def delta(self, request_id: int) -> str:
        """Text of a streamed request since the last call that no later token can change."""
        return self._streams[request_id].delta()

    def finish(self, request_id: int) -> str:
        """The rest of a streamed request's text."""
        return self._streams[request_id].finish()

    def stop_len(self, request_id: int) -> int | None:
        """Output tokens up to the one that completed a stop string; None = none did."""
        stream = self._streams.get(request_id)
        return stream.stop_len if stream is not None else None

    def text(self, request: Request) -> str:
        """The whole text. Tokens that were computed after a stop string do not count."""
        stream = self._streams.get(request.request_id)
        if stream is None:
            return decode(self.tokenizer, request.output_token_ids)
        token_ids = request.output_token_ids[: stream.stop_len]
        return decode(self.tokenizer, token_ids, request.sampling.stop, stream.stop_start)

    def result(self, request: Request) -> GenerationResult:
        """The finished request as the user sees it; the processor forgets it."""
        result = GenerationResult.from_request(
            request, self._prompts[request.request_id], self.text(request)
        )
        self.remove(request.request_id)
        return result

    def remove(self, request_id: int) -> None:
        """Forget a request, for instance an aborted one."""
        self._prompts.pop(request_id, None)
        self._streams.pop(request_id, None)
