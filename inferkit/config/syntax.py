"""Words of a command line that Hydra's grammar does not take, and how they are written instead.

Knows the grammar and the types of keys; composes nothing.
"""

import re
from dataclasses import replace

from hydra.errors import HydraException

from inferkit.config.faults import Fault, Fix, key_of, shell_quote
from inferkit.config.keys import describe_type, find_key, is_text, list_item_type
from inferkit.config.space import ConfigSpace
from inferkit.config.stray_words import meant_options

BRACKETS = {"(": ")", "[": "]", "{": "}"}
KEY = re.compile(r"[+]{0,2}[A-Za-z_][\w./]*")
NEXT_OVERRIDE = re.compile(r"[\s,]+(?=[+~]{0,2}[A-Za-z_][\w./]*=)")
"""Between two overrides that were written in one word."""
WORDS = "_overrides"
"""Ends the keys whose value is a command line itself."""


def syntax_fault(space: ConfigSpace, text: str) -> Fault | None:
    """A text that Hydra's grammar does not take, with one that it would."""
    key, equals, value = text.partition("=")
    dropped = Fix(drop=(key_of(text),))
    if not text.strip("+~ "):
        problem = "is an empty word; leave it out (a variable of the shell may be unset)"
        return Fault(key=text, given=f"'{text}'", problem=problem, fix=dropped)
    if not key.strip("+~ ").partition("@")[0]:
        return Fault(key=text, problem="no key before the '='; write KEY=VALUE", fix=dropped)
    if not equals and not text.startswith("~"):
        options = meant_options(space, text)
        meant = " ".join(map(shell_quote, options)) or (
            f"{key}=VALUE" if KEY.fullmatch(key) else "KEY=VALUE"
        )
        problem = f"has no value; write {meant}"
        return Fault(key=key, given=text, problem=problem, fix=replace(dropped, add=options))
    reason = _refusal(space, text)
    if not reason:
        return None
    problem, words = _meant(space, text) or (f"cannot be read as KEY=VALUE: {reason}", ())
    return Fault(
        key=key.lstrip("+~").strip(),
        given=text,
        problem=problem,
        fix=Fix(add=words, drop=dropped.drop),
    )


def _meant(space: ConfigSpace, text: str) -> tuple[str, tuple[str, ...]] | None:
    """What is wrong, and the words that were meant; None = unknown."""
    key, _, value = text.partition("=")
    parts = tuple(NEXT_OVERRIDE.split(text))
    if len(parts) > 1 and not key.endswith(WORDS) and _are_read(space, *parts):
        apart = " ".join(map(shell_quote, parts))
        return f"holds {len(parts)} options in one word; write them apart: {apart}", parts
    tight = f"{key.strip()}={value.strip()}"
    if tight != text and _are_read(space, tight):
        return f"has spaces around the '='; write {shell_quote(tight)}", (tight,)
    if value.endswith(",") and _are_read(space, text.rstrip(",")):
        problem = "ends in a comma; several values are one word without spaces, such as 1,2"
        return problem, (text.rstrip(","),)
    closed = text + _missing_brackets(value)
    if closed != text and _are_read(space, closed):
        return f"lacks a closing bracket; write {shell_quote(closed)}", (closed,)
    return _quoted(space, key, value)


def _quoted(space: ConfigSpace, key: str, value: str) -> tuple[str, tuple[str, ...]] | None:
    """The value with quotes, where the key takes text."""
    name = key.lstrip("+~")
    info = find_key(space.compose_job(), name)
    if info.hint is not None and list_item_type(info.hint) is str and value.startswith("["):
        items = ",".join(f"'{item.strip()}'" for item in value.strip("[]").split(","))
        text = f"{key}=[{items}]"
        if _are_read(space, text):
            return f"its items need quotes of their own: {shell_quote(text)}", (text,)
    is_known_otherwise = info.hint is not None and not is_text(info.hint)
    if space.is_group(name) or is_known_otherwise:
        takes = f"; it must be {describe_type(info.hint)}" if is_known_otherwise else ""
        return f"cannot be read{takes}", ()
    text = f"{key}='{value}'"
    if _are_read(space, text):
        return f"the value needs quotes of its own: {shell_quote(text)}", (text,)
    return None


def _refusal(space: ConfigSpace, text: str) -> str:
    """What Hydra's grammar has against a text; empty = nothing."""
    try:
        space.parse(text)
    except HydraException as error:
        return str(error).splitlines()[0]
    return ""


def _are_read(space: ConfigSpace, *texts: str) -> bool:
    return not any(_refusal(space, text) for text in texts)


def _missing_brackets(value: str) -> str:
    """The closing brackets that `value` lacks."""
    missing: list[str] = []
    for character in value:
        if character in BRACKETS:
            missing.append(BRACKETS[character])
        elif missing and character == missing[-1]:
            missing.pop()
    return "".join(reversed(missing))
