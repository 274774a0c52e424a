"""Which requests a load is made of, and when each is due. Pure functions of a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """One request of a load."""

    request_id: int
    prompt_token_ids: list[int]
    output_len: int
    """Tokens of the answer, no more and no fewer."""
    seed: int
    """Of the sampler; greedy answers do not depend on it."""
    due_s: float = 0.0
    """Seconds from the beginning of the load until it is sent, where the load has a rate."""


def make_requests(
    num_requests: int,
    *,
    prompt_len: int,
    output_len: int,
    vocab_size: int,
    seed: int,
    rate: float | None = None,
) -> list[LoadRequest]:
    """Requests of random tokens, so that no two prompts begin alike and no prefix cache helps.

    Equal arguments give equal requests. The prompts do not depend on `rate`, nor the times on the
    lengths.

    Args:
        rate: requests per second, as a Poisson process whose first request is due at once; None =
            all are due at once.
    """
    tokens = random.Random(f"tokens {seed}")
    due_s = arrivals(num_requests, rate=rate, seed=seed) if rate else [0.0] * num_requests
    return [
        LoadRequest(
            request_id=number,
            prompt_token_ids=tokens.choices(range(vocab_size), k=prompt_len),
            output_len=output_len,
            seed=seed + number,
            due_s=due_s[number],
        )
        for number in range(num_requests)
    ]


def arrivals(num_requests: int, *, rate: float, seed: int) -> Sequence[float]:
    """Seconds, rising from 0; the gaps between them are exponential with mean 1 / `rate`."""
    gaps = random.Random(f"arrivals {seed}")
    times = [0.0]
    while len(times) < num_requests:
        times.append(times[-1] + gaps.expovariate(rate))
    return times[:num_requests]
