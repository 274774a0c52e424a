"""Bodies of HTTP requests, and what they ask for. Unknown fields are ignored; null is absent."""

from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict

from inferkit.core.errors import RequestError
from inferkit.core.messages import MAX_ROOM
from inferkit.core.sampling_params import SamplingParams
from inferkit.offline.prompts import Prompt, prompt_fault

MAX_SAMPLES = 128
MAX_GENERATIONS = 1024
"""Of one request: prompts times samples."""
SAMPLING_FIELDS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


Integer: TypeAlias = Annotated[int, BeforeValidator(_not_bool)]
Number: TypeAlias = Annotated[float, BeforeValidator(_not_bool)]


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(BaseModel):
    """Fields that all generating requests share, with vLLM's names."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None
    n: Integer | None = None
    best_of: Integer | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Any] | None = None
    bootstrap_room: Integer | str | None = None
    """Of the client's own choice: makes a retry idempotent and a trace findable."""

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    def sampling_params(self, *, logprobs: int | None, **defaults: Any) -> SamplingParams:
        """Of these fields; where one is absent, of `defaults`.

        Raises:
            RequestError: a value is out of range, or would be ignored to the client's surprise.
        """
        if self.logit_bias:
            raise RequestError("logit_bias: it is not supported; leave it out")
        values = {name: value for name, value in defaults.items() if value is not None}
        for name in SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        return SamplingParams(logprobs=logprobs, **values)

    def num_samples(self, *, num_prompts: int) -> int:
        """Generations of each prompt.

        Raises:
            RequestError: more than there may be, or another number than `best_of`.
        """
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_SAMPLES:
            raise RequestError(f"n={n} is out of range; allowed is 1 to {MAX_SAMPLES}")
        if self.best_of not in (None, n):
            raise RequestError(f"best_of={self.best_of} is not supported; leave it out or use n")
        if num_prompts * n > MAX_GENERATIONS:
            raise RequestError(
                f"prompt: {num_prompts} prompts with n={n}; allowed are {MAX_GENERATIONS} "
                "generations at once"
            )
        return n

    def room(self, *, num_generations: int) -> int | None:
        """The client's own room.

        Raises:
            RequestError: it is no room, or is to name several generations.
        """
        given = self.bootstrap_room
        if given is None:
            return None
        if isinstance(given, str):
            if not given.isdecimal():
                raise RequestError(f"bootstrap_room={given!r:.40} is no number")
            given = int(given)
        if not 1 <= given <= MAX_ROOM:
            raise RequestError(f"bootstrap_room={given} is out of range; allowed is 1 to 2^63-1")
        if num_generations != 1:
            raise RequestError(
                f"bootstrap_room={given} names one generation, and this request asks for "
                f"{num_generations}; leave it out"
            )
        return given


class GenerateBody(SamplingBody):
    """Of /generate: one prompt, as text or as token ids."""

    prompt: Any = None
    text: str | None = None
    input_ids: list[Integer] | None = None
    logprobs: Integer | None = None

    def prompt_given(self) -> Prompt:
        """The one prompt.

        Raises:
            RequestError: there is none, or more than one.
        """
        given = {
            name: value
            for name in ("prompt", "text", "input_ids")
            if (value := getattr(self, name)) is not None
        }
        if len(given) != 1:
            names = ", ".join(given) or "none of them"
            raise RequestError(
                f"prompt: exactly one of prompt (text or token ids), text and input_ids is "
                f"needed; given are {names}"
            )
        ((name, prompt),) = given.items()
        fault = prompt_fault(prompt)
        if fault is not None:
            raise RequestError(f"{name}: {fault}")
        result: Prompt = prompt
        return result


class CompletionBody(SamplingBody):
    """Of /v1/completions."""

    prompt: Any = None
    logprobs: Integer | None = None
    echo: bool | None = None
    suffix: str | None = None

    def prompts(self) -> list[Prompt]:
        """One or many: text, or lists of token ids.

        Raises:
            RequestError: it is no prompt.
        """
        given = self.prompt
        if given is None:
            raise RequestError("prompt: it is missing; give text or token ids, or a list of them")
        is_many = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
        many = given if is_many else [given]
        for prompt in many:
            fault = prompt_fault(prompt)
            if fault is None and isinstance(prompt, list) and isinstance(prompt[0], dict):
                fault = "messages found; they go to /v1/chat/completions"
            if fault is not None:
                raise RequestError(f"prompt: {fault}")
        return many

    def check(self) -> None:
        """Refuse what would be ignored to the client's surprise.

        Raises:
            RequestError: names the field.
        """
        if self.echo:
            raise RequestError("echo=true is not supported; leave it out")
        if self.suffix:
            raise RequestError("suffix: insertion is not supported; leave it out")


class ChatBody(SamplingBody):
    """Of /v1/chat/completions."""

    messages: list[Any] | None = None
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def prompt(self) -> Prompt:
        """Messages whose content is text.

        Raises:
            RequestError: names the message that is wrong.
        """
        if not self.messages:
            raise RequestError("messages: it is missing or empty; at least one message is needed")
        messages = [_message(index, message) for index, message in enumerate(self.messages)]
        fault = prompt_fault(messages)
        if fault is not None:
            raise RequestError(f"messages: {fault}")
        return messages

    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens to report beside the chosen one.

        Raises:
            RequestError: top_logprobs without logprobs.
        """
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
            return None
        return self.top_logprobs or 0

    def check(self) -> None:
        """Refuse what would be ignored to the client's surprise.

        Raises:
            RequestError: names the field.
        """
        if self.tools and self.tool_choice != "none":
            raise RequestError("tools: calling tools is not supported; leave them out")
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise RequestError(f"response_format: type {kind!r:.40} is not supported; use text")


def _message(index: int, message: Any) -> dict[str, Any]:
    """A message with text for content; parts of text are joined by newlines."""
    if not isinstance(message, dict):
        raise RequestError(f"messages: message {index} is no object with role and content")
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, list):
        content = "\n".join(_part(index, part) for part in content)
    return message | {"content": content}


def _part(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise RequestError(
            f"messages: message {index} has a part of type {kind!r:.40}; only "
            '{"type": "text", "text": ...} is supported'
        )
    return text
