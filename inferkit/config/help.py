"""The text of `--help`, made from the options that are there."""

import textwrap

from inferkit.config.faults import LINE_LENGTH
from inferkit.config.space import ConfigSpace

VERBS = {"check": "check a configuration and show what it comes to, without running it"}


def help_text(program: str, space: ConfigSpace) -> str:
    width = max(len(group) for group in space.groups)
    lines = []
    for group in space.groups:
        default = space.defaults.get(group)
        names = [f"[{n}]" if n == default else n for n in space.options(group)]
        start = f"  {group:<{width}}  "
        lines += textwrap.wrap(
            ", ".join(names),
            LINE_LENGTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
        )
    groups = "\n".join(lines)
    verbs = "\n".join(f"  {program} {verb} ...    {text}" for verb, text in VERBS.items())
    return f"""\
inferkit runs large language models from one configuration.

Usage: {program} [VERB] [FLAGS] [KEY=VALUE ...]

Start here:
  {program}
      generate for the built-in prompts with the embedded model
  {program} data.dataset=jsonl data.dataset_path=prompts.jsonl scheduler.max_new_tokens=64
      your own prompts, one JSON object with "prompt" or "messages" per line
  {program} model=llama model.path=/models/my-llama model.dtype=float32
      a model of yours: a Hugging Face folder or id, or a .gguf file
  {program} check model=qwen3 model.path=Qwen/Qwen3-0.6B
      is this right, and how much memory does it want?
  {program} -m scheduler.batch_size=1,8,32 kv_cache.block_size=16,128
      a sweep: one run per combination, a table at the end

Every run leaves a folder under outputs/ with its configuration, texts and metrics.

Groups (choose with GROUP=OPTION; [default]):
{groups}

Keys (set with KEY=VALUE, e.g. scheduler.batch_size=8):
  {program} --cfg job                 the whole configuration
  {program} --cfg job -p scheduler    one node of it

Verbs:
{verbs}

Flags:
  -m                   a value list a,b becomes one run per value
  --cfg job            show the configuration instead of running it
  --info defaults      show which files it was composed from
  --config-dir DIR     more options, in folders like those of conf/
  --version            versions of inferkit and Hydra
  --hydra-help         everything else that Hydra offers

Log level: INFERKIT_LOG_LEVEL=DEBUG|INFO|WARNING|ERROR, or hydra.verbose=true."""
