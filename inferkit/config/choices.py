"""Who chose the option of each group."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.default_element import GroupDefault

from inferkit.config.origins import (
    COMMAND_LINE,
    PRIMARY,
    Origin,
    config_file,
    named_option,
    shown_path,
)
from inferkit.config.space import ConfigSpace


def find_choosers(space: ConfigSpace, overrides: Sequence[str]) -> dict[str, tuple[Origin, ...]]:
    """Group -> all who chose an option of it, the last one won; Hydra's own groups left out.

    Raises:
        HydraException: the overrides do not compose.
    """
    found = space.defaults_list(overrides)
    origins: dict[str, list[Origin]] = {}
    for default in found.defaults:
        path = str(default.config_path)
        group = path.rpartition("/")[0]
        if group == "hydra" or group.startswith(("hydra/", "schema")) or path == "schema":
            continue
        kind, text = (PRIMARY, path) if default.primary else named_option(space, path)
        choosers = _in_file(space, path, kind=kind, text=text)
        for name, origin in choosers:
            origins.setdefault(name, []).append(origin)
    for text in overrides:
        override = space.parse(text)
        name = override.key_or_group
        if space.is_group(name) and not override.is_delete():
            origin = Origin(kind=COMMAND_LINE, text=text, value=override.value())
            origins.setdefault(name, []).append(origin)
    for name, all_of_group in origins.items():
        chosen = found.overrides.known_choices.get(name)
        all_of_group.sort(key=lambda origin: origin.value == chosen)
    return {
        name: tuple(all_of_group)
        for name, all_of_group in origins.items()
        if not name.startswith("hydra/")
    }


def _in_file(
    space: ConfigSpace, path: str, *, kind: str, text: str
) -> Iterator[tuple[str, Origin]]:
    """The groups in the defaults list of a file."""
    loaded = space.loader.repository.load_config(path)
    assert loaded is not None, "it is in the defaults list"
    file = config_file(loaded, path)
    lines = _entry_lines(file) if file.is_file() else {}
    for entry in loaded.defaults_list or ():
        if isinstance(entry, GroupDefault):
            group = str(entry.group).lstrip("/")
            yield (
                group,
                Origin(
                    kind=kind,
                    text=text,
                    value=entry.value,
                    file=shown_path(file),
                    line=lines.get(group, 0),
                ),
            )


def _entry_lines(file: Path) -> dict[str, int]:
    """Group -> line of its entry in the defaults list."""
    root: Any = yaml.compose(file.read_text("utf-8"), Loader=yaml.SafeLoader)
    found = {}
    for name, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if name.value == "defaults" and isinstance(value, yaml.SequenceNode):
            for entry in value.value:
                if isinstance(entry, yaml.MappingNode):
                    key = entry.value[0][0]
                    found[key.value.split(" ")[-1].lstrip("/")] = key.start_mark.line + 1
    return found
