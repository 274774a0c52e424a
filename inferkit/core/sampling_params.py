"""What a client may ask of one generation. Knows nothing of tokenizers or schedulers."""

import hashlib
from dataclasses import dataclass
from numbers import Real

from inferkit.core.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20


def request_seed(run_seed: int, index: int) -> int:
    """The seed of the request number `index` of a run: below MAX_SEED, and as if drawn."""
    digest = hashlib.sha256(f"{run_seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % MAX_SEED


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with the names and defaults of vLLM.

    Raises:
        RequestError: a value outside its range; the message names the field, value and range.
    """

    max_tokens: int | None = None
    """Tokens to generate at most (None = `scheduler.max_new_tokens`)."""
    min_tokens: int = 0
    """EOS and stop tokens are not sampled, stop strings not looked for, before this many tokens."""
    temperature: float = 1.0
    """0 = greedy (the highest logit; ties go to the lowest token id)."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; 1 = all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 = all."""
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the most likely one; 0 = all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1 = off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logit of each token already generated."""
    seed: int | None = None
    """Same seed, same tokens, in any batch (None = one is drawn and recorded). In bfloat16 and
    float16 the logits themselves vary with the batch, and so may the tokens."""
    stop: tuple[str, ...] = ()
    """Generation ends when the text holds one of these; the text is cut before it."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after one of these tokens."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many most likely ones (None = off)."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_real("temperature", self.temperature, 0.0, None)
        _check_real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p=0.0 keeps no token; allowed is 0 < top_p <= 1 (1 = all)")
        _check_int("top_k", self.top_k, -1, None)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("repetition_penalty", self.repetition_penalty, 0.0, None)
        if self.repetition_penalty == 0.0:
            raise RequestError("repetition_penalty=0.0 is not allowed; use a value > 0 (1 = off)")
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError(f"stop={list(self.stop)!r} must hold non-empty strings")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, None)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _check_int(field: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{field}={value!r} must be an integer {_range(low, high)}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{field}={value} is out of range; allowed is {_range(low, high)}")


def _check_real(field: str, value: object, low: float, high: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{field}={value!r} must be a number {_range(low, high)}")
    number = float(value)
    if not (low <= number < float("inf")) or (high is not None and number > high):
        raise RequestError(f"{field}={value} is out of range; allowed is {_range(low, high)}")


def _range(low: float, high: float | None) -> str:
    return f">= {low}" if high is None else f"in [{low}, {high}]"
