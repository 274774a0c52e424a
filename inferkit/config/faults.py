"""What is wrong with a configuration, and how that is told. Knows no hydra."""

import difflib
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from inferkit.core.secrets import SecretText, hide, shown_override, without_typed

MAX_CELLS_SHOWN = 8
LINE_LENGTH = 100


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A change of the command line that cures a fault."""

    add: tuple[str, ...] = ()
    """Overrides to write; each takes the place of one with the same key."""
    drop: tuple[str, ...] = ()
    """Keys whose overrides are taken away."""
    flag: str = ""
    environment: tuple[str, ...] = ()
    """Variables, `NAME=VALUE`, that are set before the program."""
    is_example: bool = False
    """`add` or `environment` holds an example value, such as a path that only the user knows."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that keeps a configuration from running (or, as a warning, has no effect)."""

    key: str
    problem: str
    """A clause that follows `key=value`: "is out of range; allowed is >= 1"."""
    given: str = ""
    """`key=value` as typed, or as composed; empty = the key alone."""
    fix: Fix | None = None
    related: tuple[str, ...] = ()
    """Keys whose own faults make this one meaningless."""

    def __str__(self) -> str:
        told = _without_secrets(self)
        return f"{told.given or told.key}: {told.problem}"


def show(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, SecretText):
        return value.source
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return str(value)


@dataclass(kw_only=True)
class Findings:
    """What the rules found in one configuration."""

    faults: list[Fault] = field(default_factory=list)
    warnings: list[Fault] = field(default_factory=list)

    def refuse(
        self,
        key: str,
        value: Any,
        problem: str,
        *,
        use: Any = None,
        drop: bool = False,
        fix: Fix | None = None,
        related: Sequence[str] = (),
    ) -> None:
        """A fault of `key`; `use` is a value that would do, `drop` says the key's default would.

        `fix` is any other change that would do.
        """
        given = f"{key}={show(value)}"
        if use is not None:
            fix = Fix(add=(f"{key}={show(use)}",))
        elif drop:
            fix = Fix(drop=(key,))
        self.faults.append(
            Fault(key=key, given=given, problem=problem, fix=fix, related=tuple(related))
        )

    def warn(self, key: str, value: Any, problem: str) -> None:
        self.warnings.append(Fault(key=key, given=f"{key}={show(value)}", problem=problem))


def closest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate that was probably meant, whatever its case, or None."""
    by_lower: dict[str, str] = {}
    for candidate in candidates:
        by_lower.setdefault(candidate.lower(), candidate)
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(suggestion: str | None) -> str:
    return f"; did you mean {suggestion}?" if suggestion else ""


def shell_quote(word: str) -> str:
    """Quote for a shell; with double quotes where the word holds single ones."""
    if "'" in word and not re.search(r'["$`\\!]', word):
        return f'"{word}"'
    return shlex.quote(word)


def key_of(override: str) -> str:
    """`+scheduler.batch_size=3` -> `scheduler.batch_size`."""
    return override.lstrip("+~").partition("=")[0]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line, so that a corrected one can be shown."""

    program: str = "python -m inferkit"
    verb: str = ""
    flags: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    """Variables, `NAME=VALUE`, that a shell sets for it."""

    def __str__(self) -> str:
        words = [self.verb, *self.flags, *map(shown_override, self.overrides)]
        quoted = [shell_quote(word) for word in words if word]
        return " ".join([*self.environment, self.program, *quoted])

    def fixed(self, fixes: Iterable[Fix]) -> "Command":
        """This command after the fixes."""
        overrides, flags = list(self.overrides), list(self.flags)
        variables = list(self.environment)
        for fix in fixes:
            keys = {key_of(text) for text in fix.add}
            keys |= {name for key in fix.drop for name in (key, _group_of(key))}
            gone = [key_of(text) in keys for text in overrides]
            kept = [text for text, is_gone in zip(overrides, gone, strict=True) if not is_gone]
            place = gone.index(True) if True in gone else len(kept)
            overrides = kept[:place] + list(fix.add) + kept[place:]
            if fix.flag and fix.flag not in flags:
                flags.append(fix.flag)
            variables += [text for text in fix.environment if text not in variables]
        return replace(
            self, overrides=tuple(overrides), flags=tuple(flags), environment=tuple(variables)
        )

    def renamed(self, old_key: str, new_key: str) -> "Command":
        """This command with another key in place of a misspelt one."""
        overrides = tuple(
            new_key + text[text.index("=") :] if key_of(text) == old_key and "=" in text else text
            for text in self.overrides
        )
        return replace(self, overrides=overrides)


def _group_of(key: str) -> str:
    """`disagg.transfer._target_` -> `disagg/transfer`, whose option sets it; else the key."""
    node, _, name = key.rpartition(".")
    return node.replace(".", "/") if name == "_target_" else key


def render(
    faults: Sequence[Fault],
    *,
    works: Command | None = None,
    is_example: bool = False,
    title: str = "",
) -> str:
    """The text that a user sees: every fault, then a command line that works."""
    faults = [_without_secrets(fault) for fault in faults]
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    lines = [title or f"inferkit: {count} in the configuration; nothing was started", ""]
    for fault in faults:
        lines += [f"  {fault.given or fault.key}", *_indented(fault.problem), ""]
    if works is not None:
        lines += ["this works with a value of yours:" if is_example else "this works:"]
        lines += [f"  {works}", ""]
    return "\n".join(lines).rstrip("\n")


def _without_secrets(fault: Fault) -> Fault:
    """A fault may be about anything that was typed, also where a secret should not be."""
    problem = hide(without_typed(fault.problem))
    return replace(fault, given=hide(shown_override(fault.given)), problem=problem)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One job of a sweep, with Hydra's number."""

    number: int
    overrides: tuple[str, ...]


def render_cells(
    cells: Sequence[Cell],
    faults: Mapping[int, Sequence[Fault]],
    *,
    works: Command | None = None,
    title: str = "",
) -> str:
    """Faults of a sweep: each once, with the numbers of the cells that have it."""
    faults = {number: [_without_secrets(f) for f in found] for number, found in faults.items()}
    shared = shared_faults(cells, faults)
    count = f"{len(faults)} of {len(cells)} cells cannot run"
    lines = [title or f"inferkit: {count}; nothing was started", ""]
    for fault in shared:
        lines += [f"  every cell: {fault.given or fault.key}", *_indented(fault.problem), ""]
    varying = varying_overrides(cells)
    by_fault: dict[Fault, list[Cell]] = {}
    for cell in cells:
        for fault in faults.get(cell.number, []):
            if not any(_is_same(fault, known) for known in shared):
                by_fault.setdefault(fault, []).append(cell)
    for fault, bad in by_fault.items():
        for cell in bad[:MAX_CELLS_SHOWN]:
            lines.append(f"  cell #{cell.number} [{' '.join(varying[cell.number])}]")
        if len(bad) > MAX_CELLS_SHOWN:
            rest = bad[MAX_CELLS_SHOWN:]
            lines.append(f"  and {len(rest)} more: {_ranges([cell.number for cell in rest])}")
        lines += [*_indented(str(fault)), ""]
    if works is not None:
        lines += ["this works:", f"  {works}", ""]
    return "\n".join(lines).rstrip("\n")


def shared_faults(cells: Sequence[Cell], faults: Mapping[int, Sequence[Fault]]) -> list[Fault]:
    """Faults that every cell has; one that differs in the value only is shown by its key."""
    if len(faults) < len(cells):
        return []
    shared = []
    for fault in faults[cells[0].number]:
        same = [f for found in faults.values() for f in found if _is_same(f, fault)]
        if len(same) >= len(cells):
            is_equal = all(other == fault for other in same)
            shared.append(fault if is_equal else replace(fault, given=""))
    return shared


def _is_same(left: Fault, right: Fault) -> bool:
    return (left.key, left.problem) == (right.key, right.problem)


def varying_overrides(cells: Sequence[Cell]) -> dict[int, list[str]]:
    """Per cell number the overrides that are not the same in every cell."""
    common = set(cells[0].overrides)
    for cell in cells:
        common &= set(cell.overrides)
    return {
        cell.number: [shown_override(text) for text in cell.overrides if text not in common]
        for cell in cells
    }


def _indented(text: str) -> list[str]:
    return [
        line
        for paragraph in text.split("\n")
        for line in textwrap.wrap(
            paragraph,
            LINE_LENGTH,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 7] -> "#1-#3, #7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"#{r[0]}" if len(r) == 1 else f"#{r[0]}-#{r[-1]}" for r in runs)
