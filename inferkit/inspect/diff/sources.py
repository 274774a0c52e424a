"""What a user names as a side of a comparison: a run directory, a YAML file, or overrides."""

import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from inferkit.config.arguments import program_name
from inferkit.config.check import Checker
from inferkit.config.cluster_roles import CLUSTER, DECODE, PREFILL, own_words, unusable_words
from inferkit.config.faults import closest, did_you_mean, shell_quote
from inferkit.config.origins import CLUSTER as BY_CLUSTER
from inferkit.config.origins import COMMAND_LINE
from inferkit.config.provenance import PROVENANCE_FILE
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError
from inferkit.inspect.recorded import file_snapshot, read_json, run_snapshot
from inferkit.inspect.snapshot import Origin, Snapshot
from inferkit.inspect.take import take_snapshot

WORD = re.compile(r"""(?:[^\s'"]|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')+""")
"""A word of an override set: spaces lie in quotes, which are Hydra's own and stay."""
OVERRIDE = re.compile(r"[^\s=]+=|~")

Sides = tuple[Snapshot, Snapshot]


def take_sides(words: Sequence[str], space: ConfigSpace) -> Sides:
    """The two sides that `diff A B` names; of one cluster alone, its prefill and its decode.

    Raises:
        ConfigError: a word is no side, or there are more or fewer than can be compared.
    """
    if len(words) == 2:
        left, right = (take_side(word, space) for word in words)
        return left, right
    if len(words) == 1:
        return _roles_of(words[0], space)
    if not words:
        raise ConfigError(f"diff takes two sides, A and B; {program_name()} diff --help shows them")
    raise ConfigError(
        f"diff takes two sides and has {len(words)}: {', '.join(words)}; quote the overrides of "
        f"each; against the defaults these would be\n  {_against_defaults(' '.join(words))}"
    )


def take_side(word: str, space: ConfigSpace) -> Snapshot:
    """The snapshot of a run directory, of a YAML file, or of overrides.

    Raises:
        ConfigError: it is none of them.
    """
    path = Path(word)
    if word and path.is_dir():
        return run_snapshot(path, space)
    if word and path.is_file():
        option = _option_of(path, space)
        return file_snapshot(path, space) if option is None else take_snapshot(option, space)
    words = override_words(word)
    if words is None:
        raise ConfigError(_no_side(word))
    return take_snapshot(words, space, title=word.strip())


def override_words(text: str) -> list[str] | None:
    """The overrides of a set; None = it is no set of overrides.

    Quotes inside a word stay, for they are Hydra's; around a whole word they are a shell's.
    """
    if _misread(text):
        return None
    return [shlex.split(word)[0] if word[0] in "'\"" else word for word in WORD.findall(text)]


def _misread(text: str) -> str:
    """Why a text is no set of overrides; empty where it is one."""
    if WORD.sub("", text).strip():
        return "a quote is not closed"
    wrong = [word for word in WORD.findall(text) if not OVERRIDE.match(word.lstrip("'\""))]
    return f"{wrong[0]} is no override, which is written KEY=VALUE" if wrong else ""


def _roles_of(word: str, space: ConfigSpace) -> Sides:
    """Prefill and decode of a cluster."""
    path, words = Path(word), override_words(word)
    if word and path.is_dir():
        folders = [_instance_dir(path, role) for role in (PREFILL, DECODE)]
        if None not in folders:
            left, right = (run_snapshot(folder, space) for folder in folders if folder)
            return left, right
    elif words is not None:
        checker = Checker(space, is_run=False)
        composed = checker.check_overrides(words).composed
        if composed is not None and composed.role == CLUSTER:
            broken = list(unusable_words(composed))
            if broken:
                raise ConfigError("\n  ".join(["its roles cannot be compared", *map(str, broken)]))
            plan = checker.plan(words, composed)
            left, right = (
                _of_cluster(
                    take_snapshot(plan.words[role], space, title=f"{role} of {word.strip()}"),
                    {*words, *own_words(composed, role)},
                )
                for role in (PREFILL, DECODE)
            )
            return left, right
    raise ConfigError(
        f"diff takes two sides and has one: {word or 'the defaults'}; against the defaults it is\n"
        f"  {_against_defaults(word)}\n(one alone only of +role={CLUSTER}, whose prefill is "
        "compared with its decode)"
    )


def _of_cluster(instance: Snapshot, typed: Collection[str]) -> Snapshot:
    """With the overrides that the cluster has added told apart from those of the user."""

    def marked(origins: Iterable[Origin]) -> tuple[Origin, ...]:
        return tuple(
            replace(origin, kind=BY_CLUSTER)
            if origin.kind == COMMAND_LINE and origin.text not in typed
            else origin
            for origin in origins
        )

    leaves = {
        key: replace(leaf, origins=marked(leaf.origins)) for key, leaf in instance.leaves.items()
    }
    choosers = {group: marked(origins) for group, origins in instance.choosers.items()}
    return replace(instance, leaves=leaves, choosers=choosers)


def _against_defaults(word: str) -> str:
    return f"{program_name()} diff '' {shell_quote(word)}"


def _instance_dir(run_dir: Path, role: str) -> Path | None:
    """The folder of the first instance of a role that the run of a cluster has started."""
    processes = read_json(run_dir / PROVENANCE_FILE).get("processes", {})
    for name, facts in processes.items():
        if name.startswith(role):
            return run_dir / str(facts["run_dir"])
    return None


def _option_of(path: Path, space: ConfigSpace) -> list[str] | None:
    """`parallel=tp16` of conf/parallel/tp16.yaml, nothing of the primary configuration.

    None = the file is no option.
    """
    file = Path(os.path.realpath(path))
    for entry in space.loader.get_search_path().get_path():
        root = Path(os.path.realpath(str(entry.path).removeprefix("file://")))
        if not file.is_relative_to(root) or file.suffix != ".yaml":
            continue
        group = file.relative_to(root).parent.as_posix()
        if group == ".":
            return [] if file.stem == space.config_name else None
        if space.is_group(group):
            return [f"{'' if group in space.defaults else '+'}{group}={file.stem}"]
    return None


def _no_side(word: str) -> str:
    if OVERRIDE.match(word.lstrip("'\"")):
        return f"{word}: cannot be read as overrides: {_misread(word)}"
    path = Path(word)
    siblings = os.listdir(path.parent) if path.parent.is_dir() else []
    found = closest(path.name, siblings)
    guess = did_you_mean(str(path.parent / found) if found else None)
    return (
        f"{word}: there is no such folder or file{guess}; a side is a run directory, a YAML file, "
        "or overrides (KEY=VALUE, several in quotes)"
    )
