"""Values that one request may not have because they would harm the others.

Checked before a request is sent and again where it arrives.
"""

from collections.abc import Sequence

from inferkit.core.errors import RequestError
from inferkit.core.sampling_params import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 512
"""Characters; every token is compared with every stop string."""
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_K = 2**31 - 1
REPETITION_PENALTY_RANGE = (0.01, 100.0)
"""Beyond it float32 logits overflow, which the sampler takes for broken weights."""


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that are in range, but not for a service.

    Raises:
        RequestError: names the field, its value and what is allowed.
    """
    low, high = REPETITION_PENALTY_RANGE
    if not low <= sampling.repetition_penalty <= high:
        raise RequestError(
            f"repetition_penalty={sampling.repetition_penalty} is out of range; allowed is in "
            f"[{low}, {high}]"
        )
    if sampling.top_k > MAX_TOP_K:
        raise RequestError(f"top_k={sampling.top_k} is out of range; allowed is <= {MAX_TOP_K}")
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop has {len(sampling.stop)} strings; allowed are at most {MAX_STOP_STRINGS}"
        )
    longest = max((len(text) for text in sampling.stop), default=0)
    if longest > MAX_STOP_LEN:
        raise RequestError(
            f"stop has a string of {longest} characters; allowed are at most {MAX_STOP_LEN}"
        )
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids has {len(sampling.stop_token_ids)} entries; allowed are at most "
            f"{MAX_STOP_TOKEN_IDS}"
        )
    check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for.

    Raises:
        RequestError: names the field, some of them and what is allowed.
    """
    wrong = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if wrong:
        raise RequestError(
            f"{field}: token ids {wrong[:5]} are outside the model's vocabulary; allowed is 0 to "
            f"{vocab_size - 1}"
        )


def max_new_tokens(
    num_prompt_tokens: int, asked: int | None, *, default: int, max_model_len: int
) -> int:
    """Output tokens of a request: what it asks for, else the default (0 = to the end of the
    context).

    Raises:
        RequestError: prompt and output can never fit; names the numbers.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"prompt: it has {num_prompt_tokens} tokens; this model takes at most "
            f"{max_model_len - 1} and one new token (engine.max_model_len={max_model_len})"
        )
    if asked is not None and asked > room:
        raise RequestError(
            f"max_tokens={asked} does not fit: the prompt has {num_prompt_tokens} tokens, and "
            f"both together may have {max_model_len} (engine.max_model_len); allowed is <= {room}"
        )
    return asked or min(default or room, room)
