"""Reads prompts and turns them into token ids. Knows files and tokenizers, not models.

A prompt is text to complete, a list of chat messages, or token ids.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from inferkit.config.schema import DataConfig, DatasetName
from inferkit.core.errors import ConfigError, RequestError

Prompt: TypeAlias = str | list[dict[str, Any]] | list[int]

DEFAULT_PROMPTS_PATH = Path(__file__).with_name("default_prompts.jsonl")

JSONL_FIELDS = ("prompt", "messages", "id")
KEY_OF_FIELD = {
    **{name: f"data.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed")},
    **dict.fromkeys(
        ("max_tokens", "max_new_tokens", "max_completion_tokens"), "scheduler.max_new_tokens"
    ),
}
"""Fields by which other programs set the sampling of one prompt -> key that does for all."""


# -- files -------------------------------------------------------------------------------------


def load_prompts(data: DataConfig) -> list[Prompt]:
    """The prompts that the `data` node names, at most `data.limit`.

    Formats, one JSON object per line:
        jsonl: `prompt` (text or token ids) or `messages` (role and content each), and `id`, which
            is for the reader of the file. No other field: sampling is that of the whole run.
        LongBench: `context`, `input`; InfiniteBench: `context`, `input`, `options`. One user
            message is made of them; other fields are ignored.

    Raises:
        ConfigError: names the file, the line, the field, and what is allowed.
    """
    if data.limit is not None and data.limit < 1:
        raise ConfigError(f"data.limit={data.limit} leaves no prompt; use 1 or more, null = all")
    is_default = data.dataset is DatasetName.default
    paths = [DEFAULT_PROMPTS_PATH] if is_default else _jsonl_files(data)
    prompts = list(itertools.islice(_read(paths, _PARSERS[data.dataset]), data.limit))
    if not prompts:
        raise ConfigError(f"data.dataset_path={data.dataset_path} holds no prompt")
    return prompts


def _jsonl_files(data: DataConfig) -> list[Path]:
    if not data.dataset_path:
        raise ConfigError(
            f"data.dataset={data.dataset} needs data.dataset_path, a .jsonl file or folder of them"
        )
    path = Path(data.dataset_path).expanduser()
    if path.is_file():
        return [path]
    found = sorted(path.glob("*.jsonl")) if path.is_dir() else []
    if not found:
        problem = "holds no .jsonl file" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"data.dataset_path={path} {problem}; give a .jsonl file or a folder of them"
        )
    return found


def _read(paths: list[Path], parse: Callable[[dict[str, Any]], Prompt]) -> Iterator[Prompt]:
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield parse(_json_object(line))
                except _FieldError as error:
                    raise ConfigError(
                        f"data.dataset_path: {path} line {number}: {error}"
                    ) from error.__cause__


class _FieldError(ValueError):
    """What is wrong with one line; the reader adds where it is."""


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:  # broken JSON, or bytes that are no UTF-8
        raise _FieldError(f"not JSON ({error}); every line must be one JSON object") from error
    if not isinstance(record, dict):
        raise _FieldError(f"{type(record).__name__} found; every line must be one JSON object")
    return record


def _parse_jsonl(record: dict[str, Any]) -> Prompt:
    given = [name for name in ("prompt", "messages") if record.get(name) is not None]
    if len(given) != 1:
        raise _FieldError(
            f"fields {sorted(record)} found; exactly one of `prompt` and `messages` is needed"
        )
    for name in record:
        if name not in JSONL_FIELDS:
            key = KEY_OF_FIELD.get(name)
            advice = f"; for all prompts of the run set {key}" if key else ""
            raise _FieldError(
                f"field `{name:.40}` is not known; allowed is {', '.join(JSONL_FIELDS)}{advice}"
            )
    prompt: Prompt = record[given[0]]
    if given == ["messages"] and not isinstance(prompt, list):
        raise _FieldError(f"field `messages` is {type(prompt).__name__}; allowed is a list")
    fault = prompt_fault(prompt)
    if fault is not None:
        raise _FieldError(f"field `{given[0]}`: {fault}")
    return prompt


def _parse_long_bench(record: dict[str, Any]) -> Prompt:
    parts = [_text(record, "context"), _text(record, "input")]
    return _user_message(parts)


def _parse_infinite_bench(record: dict[str, Any]) -> Prompt:
    options = record.get("options") or []
    if not isinstance(options, list) or any(not isinstance(option, str) for option in options):
        raise _FieldError(f"field `options` is {options!r:.80}; allowed is a list of strings")
    lines = [f"{chr(ord('A') + i)}. {option}" for i, option in enumerate(options)]
    return _user_message([_text(record, "context"), _text(record, "input"), "\n".join(lines)])


def _text(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    if value is not None and not isinstance(value, str):
        raise _FieldError(f"field `{name}` is {type(value).__name__}; allowed is a string")
    return value or ""


def _user_message(parts: list[str]) -> Prompt:
    if not any(parts[:2]):
        raise _FieldError("fields `context` and `input` are both empty; one of them must hold text")
    return [{"role": "user", "content": "\n\n".join(part for part in parts if part)}]


_PARSERS: dict[DatasetName, Callable[[dict[str, Any]], Prompt]] = {
    DatasetName.default: _parse_jsonl,
    DatasetName.jsonl: _parse_jsonl,
    DatasetName.LongBench: _parse_long_bench,
    DatasetName.InfiniteBench: _parse_infinite_bench,
}


# -- token ids ---------------------------------------------------------------------------------


def prompt_fault(prompt: object) -> str | None:
    """Why this is not a prompt, or None."""
    if isinstance(prompt, str):
        return _text_fault(prompt) if prompt else "the text is empty"
    if not isinstance(prompt, list):
        return f"{type(prompt).__name__} found; allowed is text, a list of messages or of token ids"
    if not prompt:
        return "the list is empty; allowed is a list of messages or of token ids"
    if isinstance(prompt[0], dict):
        return next((fault for m in prompt if (fault := _message_fault(m)) is not None), None)
    for token_id in prompt:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            return f"{token_id!r:.80} found; allowed is a list of messages or of token ids >= 0"
    return None


def _message_fault(message: object) -> str | None:
    if not isinstance(message, dict):
        return f"message {message!r:.80} is no object with role and content"
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            return f"message {message!r:.80} needs a string `{name}`"
    return _text_fault(message["content"])


def _text_fault(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is half of a surrogate pair, which is no text"
    return None


def render_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt.

    Text is completed as it is, with the tokenizer's own rule for a beginning-of-sequence token.
    Messages go through the chat template once, which writes its special tokens itself. Token ids
    stay as they are.

    Args:
        tokenizer: a transformers tokenizer.

    Raises:
        RequestError: an empty or malformed prompt, or no chat template.
    """
    fault = prompt_fault(prompt)
    if fault is not None:
        raise RequestError(f"prompt: {fault}")
    if isinstance(prompt, str):
        token_ids = _encode_text(tokenizer, prompt)
    elif isinstance(prompt[0], dict):
        token_ids = _apply_chat_template(tokenizer, prompt)
    else:
        token_ids = [token_id for token_id in prompt if isinstance(token_id, int)]
    if not token_ids:
        raise RequestError(f"prompt {prompt!r:.80} has no token")
    return token_ids


def _encode_text(tokenizer: Any, text: str) -> list[int]:
    token_ids: list[int] = tokenizer.encode(text, verbose=False)
    # The tokenizer adds its token also where the text begins with it.
    bos = tokenizer.bos_token_id
    return token_ids[1:] if bos is not None and token_ids[:2] == [bos, bos] else token_ids


def _apply_chat_template(tokenizer: Any, messages: list[Any]) -> list[int]:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise RequestError(
            "prompt: the tokenizer of this model has no chat template, so it takes no messages; "
            "give the prompt as text, or use an instruction-tuned model"
        )
    try:
        token_ids: list[int] = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except TemplateError as error:
        roles = [message["role"] for message in messages]
        raise RequestError(
            f"prompt: the model's chat template refuses messages with the roles {roles}: {error}"
        ) from error
    return token_ids
