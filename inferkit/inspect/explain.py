"""The verb `explain`: what a key is, who has set it, and what follows from it."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from inferkit.config.arguments import Arguments, UsageError
from inferkit.config.cluster_roles import CLUSTER, INSTANCES
from inferkit.config.faults import did_you_mean
from inferkit.config.keys import similar_keys
from inferkit.config.provenance import RESOLVED_FILE
from inferkit.core.exit_codes import EXIT_OK
from inferkit.inspect.derived import DERIVED_NAMES, GROUPS
from inferkit.inspect.explain_text import (
    CANNOT_RUN,
    RECORDED_CANNOT_RUN,
    explain_all,
    explain_some,
)
from inferkit.inspect.recorded import file_snapshot, run_snapshot
from inferkit.inspect.snapshot import Derived, Snapshot
from inferkit.inspect.take import NO_MODEL_FILES, take_snapshot

USAGE = """\
Usage: inferkit explain [KEY ...] [KEY=VALUE ...] [--format text|json]
       inferkit explain DIR|FILE [KEY ...] [--format text|json]

Shows where values come from: who set each one (the schema, a file and its line, the command
line), whom it has overridden, what automatic values became, and what follows from them with the
formula. Without a KEY everything is shown. Nothing is started.

  KEY     a key (scheduler.batch_size), a node or group (parallel), or a derived value
          (rank.weight_bytes, groups.moe_ep_group)
  DIR     a run directory: what that run has recorded
  FILE    a YAML file with keys, such as the config.resolved.yaml of a run

  inferkit explain scheduler.max_new_tokens +role=decode
  inferkit explain parallel model=qwen3_235b_a22b parallel=dp8tp2
  inferkit explain rank.weight_bytes +experiment=qwen3_8b_tp2

Exit code: 0 = shown (also of a configuration that cannot run, whose faults are shown too), 2 = an
unknown KEY, or a folder or file that is no configuration."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(arguments: Arguments) -> int:
    """Print what is asked for.

    Raises:
        UsageError, ConfigError: there is no such key, folder or file.
    """
    if arguments.is_multirun:
        raise UsageError("explain shows one configuration, not a sweep; leave -m out")
    words = list(arguments.overrides)
    keys = [word for word in words if _is_key(word)]
    overrides = [word for word in words if not _is_key(word)]
    space = arguments.space()
    is_first = bool(keys) and words[0] == keys[0] and keys[0] not in space.groups
    source = keys.pop(0) if is_first and _is_place(keys[0]) else ""
    if source and overrides:
        raise UsageError(
            f"{source} is as it was recorded, so {overrides[0]} cannot change it; leave one out"
        )
    if source:
        path = Path(source)
        if not path.exists():
            raise UsageError(f"{source}: there is no such folder or file")
        snapshot = (file_snapshot if path.is_file() else run_snapshot)(path, space)
    else:
        snapshot = take_snapshot(overrides, space)
    found = select(snapshot, keys, is_whole=not source) if keys else snapshot
    if arguments.options.format == "json":
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False, default=str))
    else:
        title = RECORDED_CANNOT_RUN if source else CANNOT_RUN
        if keys:
            print(explain_some(snapshot, keys, cannot_run=title))
        else:
            print(explain_all(snapshot, cannot_run=title))
    return EXIT_OK


def _is_key(word: str) -> bool:
    return "=" not in word and not word.startswith("~")


def _is_place(word: str) -> bool:
    """Whether it names a folder or file, and no key."""
    path = Path(word)
    is_path = "/" in word or word.startswith(".") or path.suffix in (".yaml", ".yml")
    return is_path or (path / RESOLVED_FILE).is_file()


def select(snapshot: Snapshot, keys: Sequence[str], *, is_whole: bool = False) -> Snapshot:
    """The leaves, groups and derived values that `keys` name, or nodes above them.

    Args:
        is_whole: `keys` are all words without a value, so that the first may be meant as a folder.

    Raises:
        UsageError: there is no such key.
    """
    unknown = [key for key in keys if not _names(snapshot, key)]
    if unknown:
        texts = [_unknown(snapshot, key, is_place=is_whole and key == keys[0]) for key in unknown]
        faults = [f"  {line}" for text in snapshot.faults for line in text.splitlines()]
        if faults and not snapshot.derived and any(map(_is_derived, unknown)):
            texts += ["the faults of the configuration:", *faults]
        raise UsageError("\n".join(texts))
    names = {name for key in keys for name in _names(snapshot, key)}
    return replace(
        snapshot,
        choices={group: one for group, one in snapshot.choices.items() if group in names},
        choosers={group: one for group, one in snapshot.choosers.items() if group in names},
        leaves={key: leaf for key, leaf in snapshot.leaves.items() if key in names},
        derived=tuple(one for one in snapshot.derived if one.name in names),
    )


def _names(snapshot: Snapshot, key: str) -> list[str]:
    """Everything of that name, or below it."""
    return [name for name in _all_names(snapshot) if f"{name}.".startswith(f"{key}.")]


def _all_names(snapshot: Snapshot) -> Iterator[str]:
    yield from snapshot.choices
    yield from snapshot.leaves
    yield from (one.name for one in snapshot.derived)


def _unknown(snapshot: Snapshot, key: str, *, is_place: bool) -> str:
    if key.partition(".")[0] == GROUPS and _is_alone(snapshot):
        return f"{key}: there are none: parallel.world_size=1, one rank has no groups"
    if _is_derived(key) and not any(map(_is_of_model, snapshot.derived)):
        if snapshot.faults:
            return f"{key}: is not known: it follows from sizes, which have a fault"
        if NO_MODEL_FILES in snapshot.notes:
            return f"{key}: is not known: {NO_MODEL_FILES}"
    names = list(dict.fromkeys(_all_names(snapshot)))
    nodes = [name.rpartition(".")[0] for name in names if "." in name]
    near = similar_keys(key, list(dict.fromkeys([*names, *nodes])))
    advice = did_you_mean(" or ".join(near)) if near else "; `inferkit explain` shows all of them"
    place = ", and no such folder" if is_place and not near else ""
    return f"{key}: there is no such key, group or derived value{place}{advice}"


def _is_derived(key: str) -> bool:
    """Whether it is, or is a node of, derived values that a configuration may lack."""
    own = key.partition(".")[2] if key.partition(".")[0] in INSTANCES else key
    return own in (GROUPS, "rank") or own.startswith(f"{GROUPS}.") or own in DERIVED_NAMES


def _is_of_model(one: Derived) -> bool:
    return one.name.rpartition(".")[2] == "weight_bytes"


def _is_alone(snapshot: Snapshot) -> bool:
    """Whether it has one rank, and not several instances of it."""
    world_size = snapshot.leaves.get("parallel.world_size")
    return world_size is not None and world_size.value == 1 and snapshot.role != CLUSTER
