"""Where a faulty value was set, where that is a file: the command line shows the others itself."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra.errors import HydraException

from inferkit.config.faults import Fault, key_of
from inferkit.config.origins import COMMAND_LINE, PRIMARY, SCHEMA, Origin, find_origins
from inferkit.config.space import ConfigSpace, shown_path

SHOWN_ELSEWHERE = (SCHEMA, PRIMARY, COMMAND_LINE)
"""Kinds of origin that need no word: what was typed, and what nobody has set."""


def with_places(
    space: ConfigSpace, overrides: Sequence[str], faults: Sequence[Fault], *, used: Sequence[str]
) -> list[Fault]:
    """The faults, each of a value that a file has set with its place.

    Args:
        overrides: of the command line.
        used: those of them that compose.
    """
    typed = {key_of(text) for text in overrides}
    asked = {fault.key for fault in faults if fault.given.startswith(f"{fault.key}=")} - typed
    if not asked:
        return list(faults)
    try:
        origins = find_origins(space, used)
    except HydraException:
        return list(faults)  # it is told what does not compose
    places = {key: _place(origins.get(key, ())) for key in asked}
    return [
        replace(fault, problem=f"{fault.problem}\nset in {place}")
        if (place := places.get(fault.key))
        else fault
        for fault in faults
    ]


def _place(origins: Sequence[Origin]) -> str:
    """Of the last who set it; empty where it is no file of options."""
    if not origins or origins[-1].kind in SHOWN_ELSEWHERE:
        return ""
    return origins[-1].place.replace(origins[-1].file, shown_path(Path(origins[-1].file)))
