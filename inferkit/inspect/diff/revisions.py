"""The same overrides at two git revisions, each composed by its own code."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from inferkit.config.arguments import Arguments
from inferkit.config.faults import key_of, shell_quote
from inferkit.config.leaves import flat
from inferkit.core.errors import ConfigError
from inferkit.inspect.diff.compare import written
from inferkit.inspect.diff.sources import override_words
from inferkit.inspect.diff.worktree import Checkout, find_checkout
from inferkit.inspect.snapshot import SNAPSHOT_VERSION, Leaf, Snapshot
from inferkit.inspect.take import take_snapshot

COMPOSE_TIMEOUT_S = 300
"""Composing takes about a second; a slow disk and a busy machine more."""
WORKING_TREE = "working tree"
SHORT_COMMIT = 10
VERBS_FILE = Path("inferkit", "inspect", "verbs.py")
PLACE = re.compile(r'^ *File "(.+?)", line (\d+)', re.MULTILINE)
"""A place in a traceback of Python."""
NOT_KNOWN = (
    "its code has no `explain`: origins and derived values are not known, and automatic values are "
    "compared as they were written (0, auto)"
)
OTHER_FORM = NOT_KNOWN.replace("has no `explain`", "has an `explain` of another form")


def take_revisions(
    base: str, head: str | None, arguments: Arguments, *, checkout: Checkout | None = None
) -> tuple[Snapshot, Snapshot]:
    """The overrides of this command at `base` and at `head` (None = the code that runs).

    Args:
        checkout: whose revisions; None = that of the code that runs.

    Raises:
        ConfigError: there is no such revision, or nothing of inferkit's in it.
    """
    _require_single_words(arguments.overrides)
    checkout = checkout or find_checkout()
    commits = [checkout.commit_of(name) for name in (base, head) if name is not None]
    words = arguments.overrides
    left = _at_revision(base, commits[0], checkout, arguments)
    if head is not None:
        right = _at_revision(head, commits[1], checkout, arguments)
    else:
        title = _title(WORKING_TREE, words)
        right = take_snapshot(words, arguments.space(), title=title)
    if {NOT_KNOWN, OTHER_FORM} & {*left.notes, *right.notes}:
        left, right = as_written(left), as_written(right)
    return left, right


def _require_single_words(words: Sequence[str]) -> None:
    """Each word is one override of both sides.

    Raises:
        ConfigError: one is none, or several in quotes, as a side has them without --base.
    """
    for word in words:
        if not word.strip():
            raise ConfigError(
                "with --base the words are overrides of both sides, and '' is none; leave it out"
            )
        several = override_words(word) or []
        if len(several) > 1:
            raise ConfigError(
                f"'{word}': with --base every override of both sides is a word of its own: "
                + " ".join(map(shell_quote, several))
            )


def as_written(snapshot: Snapshot) -> Snapshot:
    """With automatic values as they were written, and without what follows from them."""
    leaves = {key: written(leaf) for key, leaf in snapshot.leaves.items()}
    return replace(snapshot, leaves=leaves, derived=(), warnings=())


def _title(name: str, words: Sequence[str]) -> str:
    return f"{name}: {' '.join(words) or 'defaults'}"


def _at_revision(name: str, commit: str, checkout: Checkout, arguments: Arguments) -> Snapshot:
    short = commit[:SHORT_COMMIT]
    shown = name if commit.startswith(name) else f"{name} ({short})"
    with checkout.worktree(commit) as root:
        if not (root / "inferkit" / "__main__.py").is_file():
            raise ConfigError(f"{shown}: has no inferkit/__main__.py, so it composes nothing")
        code = _Code(name=shown, root=root, flags=_flags(arguments, checkout, root))
        found = code.explain(arguments.overrides) or code.composed(arguments.overrides)
    return replace(found, title=_title(shown, arguments.overrides))


def _flags(arguments: Arguments, checkout: Checkout, root: Path) -> list[str]:
    """Flags of this command; folders of options inside the checkout are the revision's own."""
    flags = []
    for word in arguments.flags:
        inside = Path(word).resolve()
        if inside.is_dir() and inside.is_relative_to(checkout.folder / checkout.prefix):
            own = root / inside.relative_to(checkout.folder / checkout.prefix)
            word = str(own) if own.is_dir() else word
        flags.append(word)
    return flags


@dataclass(frozen=True, kw_only=True)
class _Code:
    """The inferkit of a revision."""

    name: str
    """For messages."""
    root: Path
    """The folder that holds `inferkit/`."""
    flags: Sequence[str]

    def explain(self, words: Sequence[str]) -> Snapshot | None:
        """What it says itself; None = it cannot, or says it in another form."""
        result = self._run("explain", "--format", "json", *self.flags, *words)
        if result.returncode != 0 and self._has_explain():
            raise ConfigError(f"{self.name}: its code cannot explain them: {_reason(result)}")
        try:
            data = json.loads(result.stdout)
        except ValueError:
            return None
        if not isinstance(data, dict) or data.get("version") != SNAPSHOT_VERSION:
            return None
        try:
            found = Snapshot.from_json(data)
        except (KeyError, TypeError):
            return None  # fields that one of the two versions does not know
        return found if "left_out" in data else replace(found, left_out=refused(found, words))

    def _has_explain(self) -> bool:
        """Whether its command line knows the verb."""
        file = self.root / VERBS_FILE
        return file.is_file() and '"explain"' in file.read_text("utf-8")

    def composed(self, words: Sequence[str]) -> Snapshot:
        """What can be had of any revision: the composed keys, and the faults of its check."""
        result = self._run("--cfg", "job", "--resolve", *self.flags, *words)
        leaves = _leaves(result.stdout) if result.returncode == 0 else {}
        checked = self._run("check", *self.flags, *words)
        faults = told_faults(checked.stderr) if checked.returncode else []
        if not leaves and not faults:
            raise ConfigError(
                f"{self.name}: its code cannot compose the overrides: {_reason(result)}"
            )
        role = leaves.get("role")
        return Snapshot(
            title="",
            role=role.value if role is not None else None,
            leaves=leaves,
            faults=tuple(faults),
            left_out=() if leaves else tuple(faults),
            notes=(OTHER_FORM if self._has_explain() else NOT_KNOWN,),
        )

    def _run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Its command line, in the user's folder; a Ctrl-C reaches this process alone."""
        path = os.pathsep.join(filter(None, [str(self.root), os.environ.get("PYTHONPATH")]))
        # -P: code of the folder where this is started must not take the place of the revision's.
        command = [sys.executable, "-P", "-m", "inferkit", *arguments]
        try:
            result = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=COMPOSE_TIMEOUT_S,
                check=False,
                env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"{self.name}: its code did not compose within {COMPOSE_TIMEOUT_S} s"
            ) from error
        texts = (self._without_root(text) for text in (result.stdout, result.stderr))
        return subprocess.CompletedProcess(command, result.returncode, *texts)

    def _without_root(self, text: str) -> str:
        """Its files are gone when their names are read, so they are named from its top."""
        names = [str(self.root), os.path.realpath(self.root)]
        names += [os.path.relpath(self.root)] if self.root.is_relative_to(Path.cwd()) else []
        for name in names:
            text = text.replace(f"{name}{os.sep}", "")
        return text


def _reason(result: "subprocess.CompletedProcess[str]") -> str:
    """The last line that a command said; of a traceback with the place in the code."""
    text = (result.stderr or result.stdout).strip()
    if not text:
        return f"exit code {result.returncode}, no message"
    last = text.splitlines()[-1]
    places = PLACE.findall(text)
    return f"{places[-1][0]}:{places[-1][1]}: {last}" if places else last


def refused(found: Snapshot, words: Sequence[str]) -> tuple[str, ...]:
    """Faults of words that are not in the snapshot, of code that does not tell of them."""
    known = found.leaves.keys() | found.choices.keys()
    groups = {key_of(word): word.partition("=")[2] for word in words}
    missing = {
        key
        for key, value in groups.items()
        if key not in known or (key in found.choices and found.choices[key] != value)
    }
    return tuple(text for text in found.faults if text.lstrip("+~").startswith(tuple(missing)))


def _leaves(text: str) -> Mapping[str, Leaf]:
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return {key: Leaf(value=value) for key, value in flat(content or {}).items()}


def told_faults(text: str) -> list[str]:
    """The faults in the message of a check: `key=value: problem`, each in one line."""
    faults: list[str] = []
    for block in text.split("\n\n")[1:]:
        lines = block.splitlines()
        if not lines or not lines[0].startswith("  "):
            break  # the command that works
        faults.append(f"{lines[0].strip()}: {' '.join(line.strip() for line in lines[1:])}")
    return faults
