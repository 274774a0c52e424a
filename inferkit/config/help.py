"""The text of `--help`, made from the options that are there."""

import re
import textwrap
from collections.abc import Iterator, Mapping

from inferkit.config.faults import LINE_LENGTH
from inferkit.config.space import ConfigSpace

SERIES_LENGTH = 3
"""Options of a group that differ in numbers only, on average, where each series has its line."""


def help_text(program: str, space: ConfigSpace, verbs: Mapping[str, str]) -> str:
    """The whole text.

    Args:
        verbs: verb -> what it does.
    """
    groups = "\n".join(_group_lines(space))
    roles = "\n".join(_role_lines(space))
    width = max(map(len, verbs))
    verb_lines = "\n".join(f"  {verb:<{width}}  {verbs[verb]}" for verb in verbs)
    return f"""\
inferkit runs large language models from one configuration; what you do not type has a default.

Usage: {program} [VERB] [FLAGS] [KEY=VALUE ...]

Start here:
  {program}
      generate for the built-in prompts with the embedded model
  {program} model=llama model.path=/models/my-llama data.dataset=jsonl data.dataset_path=my.jsonl
      a model of yours (a Hugging Face folder or id, or a .gguf file), and your own prompts, one
      JSON object with "prompt" or "messages" per line
  {program} check model=qwen3_235b_a22b parallel=tp16 platform.device_memory=64000000000
      is this right, and what does each rank hold? No device and no weights are needed
  {program} +role=cluster cluster.prefill=2 cluster.decode=1
      a service for OpenAI clients, prefill and decode apart
  {program} -m scheduler.batch_size=1,8,32 kv_cache.block_size=16,128
      a sweep: one run per combination, a table and pictures at the end

Every run leaves a folder under outputs/ with its configuration, texts and metrics.

Roles (add one with +role=NAME; without, the prompts are run and that is all):
{roles}

Groups (choose with GROUP=OPTION, add one that has a + with +GROUP=OPTION; [default]):
{groups}

Keys (set with KEY=VALUE, e.g. scheduler.batch_size=8):
  {program} --cfg job                       the whole configuration
  {program} --cfg job -p scheduler          one node of it
  {program} explain scheduler.batch_size    where a value comes from

Verbs ({program} VERB ...; {program} VERB --help tells more):
{verb_lines}

Flags:
  -m                   a value list a,b becomes one run per value
  --cfg job            show the configuration instead of running it
  --info defaults      show which files it was composed from
  --config-dir DIR     more options, in folders like those of conf/
  --version            versions of inferkit and Hydra
  -sc install=bash     completion by the TAB key: eval "$(inferkit -sc install=bash)"; zsh, fish too
  --hydra-help         everything else that Hydra offers

Log level: INFERKIT_LOG_LEVEL=DEBUG|INFO|WARNING|ERROR, or hydra.verbose=true."""


def _role_lines(space: ConfigSpace) -> Iterator[str]:
    """Every role with the comment that its file begins with."""
    roles = space.options("role")
    width = max(map(len, roles), default=0)
    for role in roles:
        start = f"  {role:<{width}}  "
        text = space.comment(f"role/{role}").rstrip(".") or "(its file has no comment)"
        yield from textwrap.wrap(
            text, LINE_LENGTH, initial_indent=start, subsequent_indent=" " * len(start)
        )


def _group_lines(space: ConfigSpace) -> Iterator[str]:
    """Every group but the roles with its options; one that must be added with the sign."""
    names = {
        group: group if group in space.defaults else f"+{group}"
        for group in space.groups
        if group != "role"
    }
    width = max(map(len, names.values()))
    for group, name in names.items():
        for position, options in enumerate(_paragraphs(space, group)):
            start = f"  {'' if position else name:<{width}}  "
            yield from textwrap.wrap(
                options,
                LINE_LENGTH,
                initial_indent=start,
                subsequent_indent=" " * len(start),
                break_long_words=False,
            )


def _paragraphs(space: ConfigSpace, group: str) -> Iterator[str]:
    """Options in an order that is easy to search: models of any size and of one, names that
    differ in their numbers only."""
    default, options = space.defaults.get(group), space.options(group)
    marked = {option: f"[{option}]" if option == default else option for option in options}
    if group == "model":
        families = space.model_targets
        yield ", ".join(marked[option] for option in options if option in families)
        sizes = [marked[option] for option in options if option not in families]
        if sizes:
            yield f"of one size, without weights: {', '.join(sizes)}"
        return
    series: dict[str, list[str]] = {}
    for option in options:
        series.setdefault(re.sub(r"\d+", "N", option), []).append(marked[option])
    if len(options) >= SERIES_LENGTH * len(series):
        yield from (", ".join(names) for names in series.values())
    else:
        yield ", ".join(marked.values())
