"""Words without a '=' that are no verb: what was probably meant by them."""

from collections.abc import Collection
from pathlib import Path

from inferkit.config.faults import closest, did_you_mean, shell_quote
from inferkit.config.keys import find_key, is_node
from inferkit.config.space import ConfigSpace

RUN_WORDS = ("run", "start", "offline", "generate", "infer", "inference", "launch", "bench")
FLAG_WORDS = ("help", "version")
FIRST_GROUPS = ("role", "parallel", "model", "experiment", "sweep")
"""Looked through before other groups; an option of `role` may be one of `runner` too."""


def meant_options(space: ConfigSpace, word: str) -> tuple[str, ...]:
    """The overrides that a word without a value stands for; empty = unknown.

    `serve` -> `+role=serve`; `tp2` -> `parallel=tp2`; `my.gguf` -> `model.path=my.gguf`.
    """
    known = space.groups
    for group in [*(name for name in FIRST_GROUPS if name in known), *known]:
        if word in space.options(group):
            return (f"{'' if group in space.defaults else '+'}{group}={word}",)
    if word.endswith(".jsonl"):
        return ("data.dataset=jsonl", f"data.dataset_path={word}")
    if word.endswith(".gguf") or ("/" in word and Path(word).is_dir()):
        return (f"model.path={word}",)
    return ()


def stray_first_word(word: str, verbs: Collection[str], space: ConfigSpace, program: str) -> str:
    """What to tell of the first word of a command line, which is no verb."""
    known = f"verbs are {', '.join(verbs)}; options are written KEY=VALUE"
    if word in FLAG_WORDS:
        return f"{word} is no verb; write {program} --{word}"
    if word in RUN_WORDS:
        return f"{word} is no verb, and a run needs none; write the options alone, such as\n" + (
            f"  {program} data.limit=2\n{known}"
        )
    options = meant_options(space, word)
    if options:
        return f"{word} is no verb; did you mean {' '.join(map(shell_quote, options))}?"
    info = find_key(space.compose_job(), word)
    if info.is_known and not is_node(info.hint):
        return f"{word} has no value; write {word}=VALUE"
    return f"{word} is no verb{did_you_mean(closest(word, verbs))}\n{known}"
