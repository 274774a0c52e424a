"""Text of one request while its tokens arrive. Knows nothing of prompts.

Only output tokens are decoded, so a prompt that ends inside a character cannot leak into the text.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


def find_stop(text: str, stop: Sequence[str], start: int = 0) -> int:
    """Where the first stop string begins at or after `start`; -1 = there is none."""
    places = [place for string in stop if (place := text.find(string, start)) >= 0]
    return min(places, default=-1)


def decode(
    tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str] = (), stop_start: int = 0
) -> str:
    """Text of tokens without special ones, cut before the first stop string after `stop_start`."""
    text: str = tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=True)
    place = find_stop(text, stop, stop_start)
    return text if place < 0 else text[:place]


class TextStream:
    """Decodes token by token; all deltas together are the final text.

    text: | delivered by delta() | may begin a stop string | bytes of an unfinished character |

    Args:
        tokenizer: a transformers tokenizer.
        stop: the text ends before the first of these.
        min_tokens: the text of this many tokens is never cut (as in vLLM).
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.min_tokens = min_tokens
        self.stop_start = 0
        """Where in the text a stop string may begin."""
        self.stop_len: int | None = None
        """Tokens up to the one that completed a stop string; None = none is complete."""
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._text = ""
        self._num_delivered = 0
        self._longest = max((len(string) for string in self.stop), default=1)

    def append(self, token_ids: Sequence[int]) -> bool:
        """Add tokens; True when one of them completes a stop string. Later ones are ignored."""
        for token_id in token_ids:
            if self.stop_len is not None:
                return False
            self._token_ids.append(token_id)
            piece = self._decoder.step(self.tokenizer.backend_tokenizer, token_id)
            if piece and self._add(piece):
                self.stop_len = len(self._token_ids)
                return True
        return False

    def delta(self) -> str:
        """Text since the last call that no later token can change."""
        end = len(self._text)
        if self.stop_len is None:
            end -= self._num_held_back()
        return self._deliver(end)

    def finish(self) -> str:
        """The rest of the text, when no token follows."""
        if self.stop_len is None:
            text = decode(self.tokenizer, self._token_ids)
            self._add(text[len(self._text) :])
        return self._deliver(len(self._text))

    def _add(self, piece: str) -> bool:
        """Append decoded text and cut it at a stop string; True when there was one."""
        start = max(self.stop_start, len(self._text) - self._longest + 1)
        self._text += piece
        if len(self._token_ids) <= self.min_tokens:
            self.stop_start = len(self._text)
            return False
        place = find_stop(self._text, self.stop, start)
        if place >= 0:
            self._text = self._text[:place]
        return place >= 0

    def _num_held_back(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            if any(string.startswith(self._text[-length:]) for string in self.stop):
                return length
        return 0

    def _deliver(self, end: int) -> str:
        start, self._num_delivered = self._num_delivered, max(end, self._num_delivered)
        return self._text[start:end]
