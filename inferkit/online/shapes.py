"""Generations as JSON: the forms of /generate, /v1/completions and /v1/chat/completions."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from inferkit.core.request import TokenLogprobs
from inferkit.offline.result import MIN_LOGPROB
from inferkit.online.generation import Generation, Piece

Json = dict[str, Any]


class Shape(Protocol):
    """How one kind of answer looks."""

    def whole(self, generations: Sequence[Generation]) -> Json:
        """The answer in one piece; all generations are over."""
        ...

    def chunk(self, generation: Generation, piece: Piece, *, is_first: bool) -> Json:
        """One event of a stream; `is_first` of its generation."""
        ...

    def usage_chunk(self, generations: Sequence[Generation]) -> Json:
        """The event before the end that tells the counts."""
        ...


def usage(generations: Sequence[Generation]) -> Json:
    """Counts of tokens; a prompt with several generations counts once."""
    prompts = [g.request for g in generations if g.request.sample_index == 0]
    num_prompt = sum(request.num_prompt_tokens for request in prompts)
    num_output = sum(len(g.request.output_token_ids) for g in generations)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {
            "cached_tokens": sum(request.num_cached_tokens for request in prompts)
        },
    }


class GenerateShape:
    """Of /generate: one generation."""

    def __init__(self, *, request_id: str) -> None:
        self.request_id = request_id

    def whole(self, generations: Sequence[Generation]) -> Json:
        (generation,) = generations
        request = generation.request
        answer = self._base(generation) | {
            "output": generation.text,
            "output_ids": request.output_token_ids,
            "finish_reason": request.finish_reason,
            "seed": request.seed,
            "usage": usage(generations),
        }
        if request.sampling.logprobs is not None:
            answer["logprobs"] = [_raw(entry) for entry in request.output_logprobs]
        return answer

    def chunk(self, generation: Generation, piece: Piece, *, is_first: bool) -> Json:
        answer = self._base(generation) | {
            "output": piece.text,
            "output_ids": piece.token_ids,
            "finish_reason": piece.finish_reason,
        }
        if generation.request.sampling.logprobs is not None:
            answer["logprobs"] = [_raw(entry) for entry in piece.logprobs]
        return answer

    def usage_chunk(self, generations: Sequence[Generation]) -> Json:
        return self._base(generations[0]) | {
            "output": "",
            "output_ids": [],
            "usage": usage(generations),
        }

    def _base(self, generation: Generation) -> Json:
        # A room has up to 63 bits; a JSON number would lose some in many clients.
        return {"request_id": self.request_id, "bootstrap_room": str(generation.room)}


class CompletionShape:
    """Of /v1/completions."""

    def __init__(self, *, request_id: str, model: str, tokenizer: Any) -> None:
        self.request_id = request_id
        self.model = model
        self.tokenizer = tokenizer
        self.created = int(time.time())
        self._text_lens: dict[int, int] = {}

    def whole(self, generations: Sequence[Generation]) -> Json:
        choices = [
            self._choice(
                generation,
                generation.text,
                generation.request.output_logprobs,
                str(generation.request.finish_reason),
            )
            for generation in generations
        ]
        return self._base() | {"choices": choices, "usage": usage(generations)}

    def chunk(self, generation: Generation, piece: Piece, *, is_first: bool) -> Json:
        reason = None if piece.finish_reason is None else str(piece.finish_reason)
        return self._base() | {
            "choices": [self._choice(generation, piece.text, piece.logprobs, reason)]
        }

    def usage_chunk(self, generations: Sequence[Generation]) -> Json:
        return self._base() | {"choices": [], "usage": usage(generations)}

    def _base(self) -> Json:
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _choice(
        self,
        generation: Generation,
        text: str,
        logprobs: Sequence[TokenLogprobs],
        reason: str | None,
    ) -> Json:
        has_logprobs = generation.request.sampling.logprobs is not None
        return {
            "index": generation.index,
            "text": text,
            "finish_reason": reason,
            "logprobs": self._logprobs(generation.index, logprobs) if has_logprobs else None,
        }

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> Json:
        tokens = [token_text(self.tokenizer, entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._text_lens.get(index, 0))
            self._text_lens[index] = offsets[-1] + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The chosen token and the most likely ones, by their text; of equal texts the likelier."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(token_text(self.tokenizer, token_id), finite(logprob))
        return top


class ChatShape:
    """Of /v1/chat/completions."""

    def __init__(self, *, request_id: str, model: str, tokenizer: Any) -> None:
        self.request_id = request_id
        self.model = model
        self.tokenizer = tokenizer
        self.created = int(time.time())

    def whole(self, generations: Sequence[Generation]) -> Json:
        choices = [
            {
                "index": generation.index,
                "message": {"role": "assistant", "content": generation.text},
                "finish_reason": str(generation.request.finish_reason),
                "logprobs": self._logprobs(generation, generation.request.output_logprobs),
            }
            for generation in generations
        ]
        return self._base("chat.completion") | {"choices": choices, "usage": usage(generations)}

    def chunk(self, generation: Generation, piece: Piece, *, is_first: bool) -> Json:
        delta = {"role": "assistant"} if is_first else {}
        choice = {
            "index": generation.index,
            "delta": delta | {"content": piece.text},
            "finish_reason": None if piece.finish_reason is None else str(piece.finish_reason),
            "logprobs": self._logprobs(generation, piece.logprobs),
        }
        return self._base("chat.completion.chunk") | {"choices": [choice]}

    def usage_chunk(self, generations: Sequence[Generation]) -> Json:
        counts = usage(generations)
        return self._base("chat.completion.chunk") | {"choices": [], "usage": counts}

    def _base(self, kind: str) -> Json:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _logprobs(self, generation: Generation, entries: Sequence[TokenLogprobs]) -> Json | None:
        if generation.request.sampling.logprobs is None:
            return None
        content = [
            self._token(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._token(*candidate) for candidate in entry.top]}
            for entry in entries
        ]
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = token_text(self.tokenizer, token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


def token_text(tokenizer: Any, token_id: int) -> str:
    """Text of one token by itself; parts of characters are replacement characters."""
    text: str = tokenizer.backend_tokenizer.decode([token_id], skip_special_tokens=False)
    return text


def finite(logprob: float) -> float:
    """JSON has no minus infinity."""
    return max(logprob, MIN_LOGPROB)


def _raw(entry: TokenLogprobs) -> Json:
    return {
        "token_id": entry.token_id,
        "logprob": finite(entry.logprob),
        "rank": entry.rank,
        "top": [[token_id, finite(logprob)] for token_id, logprob in entry.top],
    }
