"""Where every value of a configuration comes from: all who set it, the last one won.

Replays what Hydra merges, in its order: the schema's defaults, the files of the defaults list,
the overrides of the command line. What is used of Hydra's inside is pinned by tests.
"""

import ast
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.default_element import ResultDefault
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from inferkit.config.leaves import flat
from inferkit.config.space import CONF_DIR, ConfigSpace
from inferkit.config.yaml_lines import key_lines, line_of

SCHEMA, PRIMARY, OPTION, COMMAND_LINE = "schema", "primary", "option", "command line"
AUTOMATIC = "automatic"
CLUSTER = "the cluster"
"""Kind of what +role=cluster adds to the overrides of its instances."""
ADDED = ("role", "experiment", "sweep")
"""Groups whose options set keys of any node; each is a kind of origin of its own."""
MISSING = "???"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Who has set a value."""

    kind: str
    """schema, primary, option, role, experiment, sweep, command line, the cluster, automatic, or
    file (a YAML file that is no option)."""
    text: str
    """`parallel=tp16` for an option, the override as typed for the command line; for an automatic
    value the rule with its numbers. Empty for the schema."""
    value: Any
    """What it set, as it was written: `${...}` is not resolved."""
    file: str = ""
    """Relative to conf/ where it is inside, as `conf/role/prefill.yaml`; empty = no file."""
    line: int = 0
    """From 1; 0 = no file."""

    @property
    def place(self) -> str:
        """`conf/role/prefill.yaml:9`."""
        return f"{self.file}:{self.line}" if self.line else self.file


Origins = Mapping[str, tuple[Origin, ...]]
"""Dotted key -> all who set it, in order. Keys are leaves: see Snapshot.leaves."""


def find_origins(space: ConfigSpace, overrides: Sequence[str]) -> dict[str, tuple[Origin, ...]]:
    """Of every leaf that the overrides compose to, before automatic values are resolved.

    Raises:
        HydraException: they do not compose.
    """
    found = space.defaults_list(overrides)
    history, lines = _History(), _SchemaLines()
    for default in found.defaults:
        if not str(default.config_path).startswith("hydra/"):
            history.add(_of_default(space, default, lines))
    for override in found.config_overrides:
        key = override.key_or_group
        if override.is_hydra_override():
            continue
        if override.is_delete():
            history.drop(key)
            continue
        text = override.input_line or ""
        for name, value in flat({key: _plain(override.value())}).items():
            history.add([(name, Origin(kind=COMMAND_LINE, text=text, value=value))])
    return history.origins


class _History:
    """Who set what, as merges add up."""

    def __init__(self) -> None:
        self._origins: dict[str, list[Origin]] = {}

    @property
    def origins(self) -> dict[str, tuple[Origin, ...]]:
        return {key: tuple(found) for key, found in self._origins.items()}

    def add(self, entries: Iterable[tuple[str, Origin]]) -> None:
        for key, origin in entries:
            if origin.value == {} and self._below(key):
                continue  # nothing, merged into entries
            self.drop(key, itself=False)
            parent = key.rpartition(".")[0]
            while parent:  # it was empty or null until now
                self._origins.pop(parent, None)
                parent = parent.rpartition(".")[0]
            origins = self._origins.setdefault(key, [])
            if origin not in origins[-1:]:  # a schema that extends another repeats its defaults
                origins.append(origin)

    def drop(self, key: str, *, itself: bool = True) -> None:
        """Forget everything below `key`, and itself."""
        for name in self._below(key):
            del self._origins[name]
        if itself:
            self._origins.pop(key, None)

    def _below(self, key: str) -> list[str]:
        return [name for name in self._origins if name.startswith(f"{key}.")]


class _SchemaLines:
    """Where the fields of dataclasses are declared; every class is read once."""

    def __init__(self) -> None:
        self._of_class: dict[type, Mapping[str, int]] = {}

    def place(self, cls: type, name: str) -> tuple[str, int]:
        """File and line of a field, the class's own or inherited."""
        for base in cls.__mro__:
            if base not in self._of_class:
                self._of_class[base] = _field_lines(base)
            line = self._of_class[base].get(name)
            if line is not None:
                return f"{base.__module__.replace('.', '/')}.py", line
        return "", 0


def _field_lines(cls: type) -> Mapping[str, int]:
    """Field -> line of those that a class itself declares."""
    module = sys.modules[cls.__module__]
    if not is_dataclass(cls) or not getattr(module, "__file__", None):
        return {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            return {
                line.target.id: line.lineno
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            }
    return {}


def _of_schema(
    config: DictConfig, prefix: str, lines: _SchemaLines
) -> Iterator[tuple[str, Origin]]:
    """The defaults of a dataclass."""
    cls = OmegaConf.get_type(config)
    container = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    assert isinstance(container, dict) and cls is not None, "it is typed"
    for name, value in container.items():
        key, child = f"{prefix}{name!s}", config._get_node(name)
        if isinstance(child, DictConfig) and is_dataclass(OmegaConf.get_type(child)):
            yield from _of_schema(child, f"{key}.", lines)
        elif value != MISSING:
            file, line = lines.place(cls, str(name))
            for leaf, leaf_value in flat({key: value}).items():
                yield leaf, Origin(kind=SCHEMA, text="", value=leaf_value, file=file, line=line)


def _of_default(
    space: ConfigSpace, default: ResultDefault, schema_lines: _SchemaLines
) -> Iterator[tuple[str, Origin]]:
    """What one entry of the defaults list sets."""
    path = str(default.config_path)
    loaded = space.loader.repository.load_config(path)
    assert loaded is not None, "it is in the defaults list"
    prefix = f"{default.package}." if default.package else ""
    config = loaded.config
    if not isinstance(config, DictConfig):
        return
    if is_dataclass(OmegaConf.get_type(config)):
        yield from _of_schema(config, prefix, schema_lines)
        return
    kind, text = (PRIMARY, path) if default.primary else named_option(space, path)
    file = config_file(loaded, path)
    lines = key_lines(file) if file.is_file() else {}
    container = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    assert isinstance(container, dict), "it was a dictionary before"
    container.pop("hydra", None)
    for key, value in flat(container).items():
        if value != MISSING:
            line = line_of(lines, key)
            origin = Origin(kind=kind, text=text, value=value, file=shown_path(file), line=line)
            yield f"{prefix}{key}", origin


def named_option(space: ConfigSpace, path: str) -> tuple[str, str]:
    """Kind of an origin, and how the option is chosen: `role`, `+role=decode`."""
    group, _, option = path.rpartition("/")
    sign = "" if group in space.defaults else "+"
    return group if group in ADDED else OPTION, f"{sign}{group}={option}"


def config_file(loaded: ConfigResult, path: str) -> Path:
    """The file of what Hydra has loaded under the name `path`."""
    return Path(str(loaded.path).removeprefix("file://")) / f"{path.removesuffix('.yaml')}.yaml"


def shown_path(file: Path) -> str:
    """`conf/role/prefill.yaml`, or relative to this folder, or absolute."""
    for folder, name in ((CONF_DIR, Path("conf")), (Path.cwd(), Path())):
        real = Path(os.path.realpath(folder))
        path = Path(os.path.realpath(file))
        if path.is_relative_to(real):
            return str(name / path.relative_to(real))
    return str(file)


def _plain(value: Any) -> Any:
    """An override's value as the configuration keeps it."""
    kept = OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=False)
    assert isinstance(kept, dict), "it was made as a dictionary"
    return kept["value"]
