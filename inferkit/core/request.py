"""One request and its state. Token ids only: text lives where the tokenizer is."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from inferkit.core.sampling_params import SamplingParams


class RequestState(StrEnum):
    """waiting -> prefilling -> running -> finished; a preempted request goes back to waiting."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    PROMPT_TOO_LONG = "prompt_too_long"
    REFUSED = "refused"
    """The request can never run with this configuration; `finish_detail` names the numbers."""
    ABORT = "abort"
    CONFLICT = "conflict"
    """The room belongs to another request that still runs."""
    UNAVAILABLE = "unavailable"
    """Not this pair of instances, or not now: another attempt may do it."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The two instances that serve an attempt, each in one life of its own, and where decode
    learns how to reach prefill. Protocol section 1."""

    prefill_id: str
    prefill_epoch: int
    decode_id: str
    decode_epoch: int
    bootstrap_url: str
    """Of the prefill instance, `http://host:port`."""


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """What makes a request one half of a request: the other half has the same room and attempt."""

    room: int
    attempt: int
    pair: Pair
    remaining_ms: int
    """Time that was left when the message arrived."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one position under the raw model distribution."""

    token_id: int
    logprob: float
    rank: int
    """1 = the most likely token."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the most likely tokens, best first."""


@dataclass(kw_only=True, eq=False)
class Request:
    """A request's whole state: `to_dict` writes it down, `from_dict` continues it elsewhere.

    `num_computed_tokens` tokens of prompt + output have their KV in the cache; the token that
    the last one predicts is sampled when all `num_tokens` are computed.
    """

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    """Seed of the sampler; drawn by the creator of the request where the client sent none."""
    sample_index: int = 0
    handoff: Handoff | None = None
    """Of a request that is computed by two instances."""
    num_truncated_tokens: int = 0
    """Tokens that the prompt lost at its end because it was too long for the configuration."""
    max_tokens: int = 0
    """Resolved limit of output tokens; set by the scheduler on admission."""
    output_token_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the request was first admitted."""
    num_decode_steps: int = 0
    num_preemptions: int = 0
    num_skips: int = 0
    """Steps in which this request waited because blocks were short."""
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    finish_detail: str = ""
    """A sentence for the user, where the reason alone does not explain it."""
    valid_output_len: int | None = None
    """Output length at which the request was done (fixed steps go on after it)."""
    arrival_time_s: float = 0.0
    first_scheduled_time_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    finish_time_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def is_decoding(self) -> bool:
        """Only the newest token is not computed yet."""
        return self.state is RequestState.RUNNING

    def token_ids(self, start: int, end: int) -> list[int]:
        """Token ids of positions [start, end) of prompt + output."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        tail = self.output_token_ids[max(0, start - num_prompt) : end - num_prompt]
        return self.prompt_token_ids[start:] + tail if start < num_prompt else tail

    def to_dict(self) -> dict[str, Any]:
        """Everything that is needed to continue the request elsewhere, as plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Request":
        """Rebuild a request whose KV is not here: it is computed again from its tokens."""
        values = dict(data) | {"handoff": None}
        values["sampling"] = SamplingParams(**values["sampling"])
        values["output_logprobs"] = [
            TokenLogprobs(**{**entry, "top": tuple((int(i), p) for i, p in entry["top"])})
            for entry in values["output_logprobs"]
        ]
        values["state"] = RequestState(values["state"])
        reason = values["finish_reason"]
        values["finish_reason"] = None if reason is None else FinishReason(reason)
        request = cls(**values)
        if not request.is_finished:
            request.state = RequestState.WAITING
            request.num_computed_tokens = 0
        return request
