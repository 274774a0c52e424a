"""On which line of a YAML file a key is written."""

from collections.abc import Iterator
from pathlib import Path

import yaml


def key_lines(file: Path) -> dict[str, int]:
    """Dotted key -> line from 1, of nodes and leaves. What `<<` brings in has no line of its own.

    Raises:
        OSError: it cannot be read.
        yaml.YAMLError: it is no YAML.
    """
    root = yaml.compose(file.read_text("utf-8"), Loader=yaml.SafeLoader)
    return dict(_lines(root, ""))


def line_of(lines: dict[str, int], key: str) -> int:
    """The line of `key`, or of the nearest node that holds it; 0 = of none."""
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return lines.get(key, 0)


def _lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        if isinstance(name, yaml.ScalarNode):
            key = f"{prefix}{name.value}"
            yield key, name.start_mark.line + 1
            yield from _lines(value, f"{key}.")
