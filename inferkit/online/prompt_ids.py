"""Token ids of what a client sends: text, token ids, or messages with a template's variables."""

import inspect
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError

from inferkit.core.errors import RequestError
from inferkit.offline.prompts import Prompt, prompt_fault, render_prompt


def render(
    tokenizer: Any, prompt: Prompt, template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """As `render_prompt`; `template_kwargs` are further variables of the chat template.

    Raises:
        RequestError: an empty or malformed prompt, or one that the template refuses.
    """
    is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    if not template_kwargs or not is_chat or not tokenizer.chat_template:
        return render_prompt(tokenizer, prompt)
    fault = prompt_fault(prompt)
    if fault is not None:
        raise RequestError(f"messages: {fault}")
    # Arguments of the tokenizer itself, a template among them, are not for a client to set.
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    taken = sorted(own.keys() & template_kwargs.keys())
    if taken:
        raise RequestError(
            f"chat_template_kwargs: {', '.join(taken)} cannot be set by a request; allowed are "
            "variables of the model's own chat template"
        )
    try:
        token_ids: list[int] = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **template_kwargs
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise RequestError(
            f"chat_template_kwargs={dict(template_kwargs)!r:.200} is refused by the model's chat "
            f"template: {error}"
        ) from error
    return token_ids
