"""The page of a report: what it shows, and how it becomes one HTML file.

Everything is in the file: pictures, style, script. Its security policy lets nothing be loaded and
no other script run, and every text is escaped.
"""

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from inferkit.core.secrets import hide

TEMPLATES = Path(__file__).resolve().parent / "templates"
KEPT_CONTROLS = "\n\t"
MANY_LINES, SHORT_LINE = 6, 40
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A name and what it is."""

    name: str
    value: str

    @property
    def is_list(self) -> bool:
        """Many short lines, which stand beside each other where there is room."""
        lines = self.value.split("\n")
        return len(lines) >= MANY_LINES and max(map(len, lines)) <= SHORT_LINE


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A figure that matters most."""

    label: str
    value: str
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Picture:
    text: str
    path: Path

    @property
    def uri(self) -> Markup:
        data = base64.b64encode(self.path.read_bytes()).decode("ascii")
        return Markup(f"data:image/png;base64,{data}")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong with the run, or with a cell of a sweep."""

    title: str
    text: str = ""
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of the configuration."""

    key: str
    value: str
    set_by: str = ""
    """Empty = not recorded."""
    instead_of: tuple["Overridden", ...] = ()
    kind: str = ""
    """default = nothing but the schema, or what follows from it, has set it; set = the command
    line, a role, an experiment or a sweep has; empty = an option of a group has."""


@dataclass(frozen=True, kw_only=True)
class Overridden:
    value: str
    who: str


@dataclass(frozen=True, kw_only=True)
class DerivedRow:
    name: str
    value: str
    formula: str


@dataclass(frozen=True, kw_only=True)
class Title:
    """Of a column."""

    text: str
    is_number: bool = False


@dataclass(frozen=True, kw_only=True)
class Field:
    """A cell of a table."""

    text: str
    value: str = ""
    """What it is sorted by."""
    is_number: bool = False
    link: str = ""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    cells: tuple[Field, ...]
    kind: str = ""
    """best, bad, or empty."""


@dataclass(frozen=True, kw_only=True)
class Table:
    titles: tuple[Title, ...]
    rows: tuple[TableRow, ...]
    text: str = ""
    best: str = ""


@dataclass(frozen=True, kw_only=True)
class StatisticRow:
    name: str
    texts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    columns: tuple[str, ...]
    """Of the statistics: mean, p50, ..."""
    statistics: tuple[StatisticRow, ...]
    figures: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class LongText:
    """A text that is folded where it is long."""

    whole: str
    start: str = ""

    @property
    def is_long(self) -> bool:
        return bool(self.start)


@dataclass(frozen=True, kw_only=True)
class Generation:
    request_id: int
    facts: tuple[str, ...]
    """How it ended, number of tokens, times."""
    prompt: LongText
    output: LongText


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a report shows; what is empty is left out."""

    title: str
    status: str
    is_ok: bool
    facts: Sequence[str] = ()
    """When, where, how long."""
    command: str = ""
    tiles: Sequence[Tile] = ()
    errors: Sequence[Failure] = ()
    notes: Sequence[str] = ()
    table: Table | None = None
    """Of the cells of a sweep."""
    pictures: Sequence[Picture] = ()
    metrics: Metrics | None = None
    generations: Sequence[Generation] = ()
    more_generations: int = 0
    requests: Table | None = None
    """Of a load."""
    configuration_of: str = ""
    """Whose it is, where that is not clear."""
    choices: Sequence[str] = ()
    nodes: Sequence[Sequence[Key]] = ()
    """Keys, those of one node together."""
    derived: Sequence[DerivedRow] = ()
    provenance: Sequence[Row] = ()
    footer: str = field(default="")


def render(page: Page) -> str:
    """The whole HTML file."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    style, script = (_asset(name) for name in ("report.css", "report.js"))
    return environment.get_template("report.html").render(
        page=page, style=style, script=script, policy=_policy(style=style, script=script)
    )


def _asset(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text("utf-8"))


def _policy(**assets: str) -> Markup:
    """Nothing from elsewhere, and of style and script just our own."""
    rules = ["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    for kind, text in assets.items():
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
        rules.append(f"{kind}-src 'sha256-{digest}'")
    return Markup("; ".join(rules))


def _printable(value: Any) -> Any:
    """Every text of the page: without secrets, and without characters that no page may hold."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return "".join(
        c if c.isprintable() or c in KEPT_CONTROLS or not _is_control(c) else REPLACEMENT
        for c in hide(value)
    )


def _is_control(character: str) -> bool:
    """C0, C1, lone surrogates, and marks that turn the direction of what stands around them."""
    code = ord(character)
    return (
        code < 0x20
        or 0x7F <= code < 0xA0
        or 0xD800 <= code < 0xE000
        or 0x202A <= code <= 0x202E
        or 0x2066 <= code <= 0x2069
    )


def link_to(target: Path, page: Path) -> str:
    """A relative address, so that folder and page can be moved together."""
    return quote(os.path.relpath(target.resolve(), page.resolve().parent))
