"""The table of all keys in conf/README.md, made from the schema's own docstrings.

`python -m inferkit.config.reference` prints it, with `--update` it is written into the file.
"""

import ast
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

import omegaconf

from inferkit.config import schema
from inferkit.config.keys import describe_type, enum_members, is_dictionary, is_node
from inferkit.config.schema import DecodeSchedulerConfig, InferenceConfig, SchedulerConfig
from inferkit.config.space import CONF_DIR

README = CONF_DIR / "README.md"
COMMAND = "python -m inferkit.config.reference --update"
BEGIN, END = f"<!-- made by {COMMAND} -->", "<!-- end of what is made -->"
ROLE_SCHEMAS: dict[type, tuple[str, type]] = {SchedulerConfig: ("decode", DecodeSchedulerConfig)}
"""Schema of a node -> the role that has more keys there, and its schema."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """A row of the table."""

    name: str
    """Dotted."""
    type: str
    default: str
    text: str


def reference() -> str:
    """Markdown: keys of the root, then a section for each node."""
    root = list(_keys(InferenceConfig, "", is_deep=False))
    parts = [_table(root)]
    for field in fields(InferenceConfig):
        hint = typing.get_type_hints(InferenceConfig)[field.name]
        if is_node(hint):
            text = _one_line(inspect.getdoc(hint) or "")
            parts.append(f"### `{field.name}`\n\n{textwrap.fill(text, 100)}\n")
            parts.append(_table(list(_keys(hint, f"{field.name}."))))
    return "\n".join(parts)


def key_texts() -> dict[str, str]:
    """Key or node -> its meaning in one line."""
    found = {key.name: key.text for key in _keys(InferenceConfig, "", is_deep=False)}
    for name, hint in typing.get_type_hints(InferenceConfig).items():
        if is_node(hint):
            found[name] = _one_line(inspect.getdoc(hint) or "")
            found |= {key.name: key.text for key in _keys(hint, f"{name}.")}
    return found


def _keys(cls: type, prefix: str, *, is_deep: bool = True) -> Iterator[Key]:
    """Rows of a node; those of nodes within it follow where they stand.

    Raises:
        ValueError: a field has no docstring.
    """
    hints, texts = typing.get_type_hints(cls), field_texts(cls)
    for field in fields(cls):
        hint, name = hints[field.name], f"{prefix}{field.name}"
        if is_node(hint) and not is_deep:
            continue
        if field.name not in texts:
            raise ValueError(f"{cls.__name__}.{field.name} has no docstring below it")
        text = texts[field.name]
        if is_node(hint):
            yield Key(name=name, type="node", default="", text=text)
            yield from _keys(hint, f"{name}.")
        else:
            yield Key(name=name, type=_type(hint), default=_default(field), text=text)
    if cls in ROLE_SCHEMAS:
        role, more = ROLE_SCHEMAS[cls]
        known = {field.name for field in fields(cls)}
        for key in _keys(more, prefix):
            if key.name.removeprefix(prefix) not in known:
                only = f"+role={role} only: {key.text[0].lower()}{key.text[1:]}"
                yield Key(name=key.name, type=key.type, default=key.default, text=only)


def field_texts(cls: type) -> dict[str, str]:
    """Field -> the docstring below it, from the class or the nearest base that has one."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        if base.__module__ == schema.__name__:
            found = _own_texts(base) | found
    return found


def _own_texts(cls: type) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef), "the source of a class is one"
    texts = {}
    for statement, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    texts[statement.target.id] = _one_line(text)
    return texts


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _type(hint: Any) -> str:
    """`integer`, `number or null`, `hash, least_loaded`."""
    members = enum_members(hint)
    if members:
        return ", ".join(members)
    if is_dictionary(hint):
        return "dictionary"
    words = describe_type(hint).partition(" such as ")[0]
    return words.removeprefix("an ").removeprefix("a ")


def _default(field: "Field[Any]") -> str:
    value = field.default if field.default_factory is NO_DEFAULT else field.default_factory()
    if value == omegaconf.MISSING:
        return "by the option"
    if isinstance(value, Enum):
        return f"`{value.name}`"
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower()}`".replace("none", "null")
    if isinstance(value, list):
        return f"`[{','.join(map(str, value))}]`"
    return f"`{value}`" if value != "" else '`""`'


def _table(keys: list[Key]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{key.name}` | {key.type} | {key.default} | {key.text.replace('|', chr(92) + '|')} |"
        for key in keys
    ]
    return "\n".join(rows) + "\n"


def with_reference(text: str) -> str:
    """The README with the table as the schema has it now.

    Raises:
        ValueError: the lines between which it stands are not there.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the lines {BEGIN} and {END} are missing")
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def main(words: list[str], readme: Path = README) -> int:
    """Print the table, or update the file; returns the exit code."""
    if words not in ([], ["--update"]):
        print(f"usage: {COMMAND}", file=sys.stderr)
        return 2
    if words:
        readme.write_text(with_reference(readme.read_text("utf-8")), encoding="utf-8")
    else:
        print(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
