"""A configuration as `explain` shows it and `diff` compares it: plain data, whole as JSON.

Another revision of inferkit hands its own over as JSON (`inferkit explain --format json`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from inferkit.config.origins import Origin as Origin
from inferkit.core.secrets import hide, shown, shown_override, without_typed

SNAPSHOT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One key of a configuration."""

    value: Any
    """As it runs: interpolations and automatic values resolved. Plain JSON."""
    origins: tuple[Origin, ...] = ()
    """All who set it, the last one won. Empty = not known (a YAML file by itself)."""


def _shown_leaf(key: str, leaf: Leaf) -> Leaf:
    origins = tuple(
        replace(origin, value=shown(key, origin.value), text=shown_override(origin.text))
        for origin in leaf.origins
    )
    return Leaf(value=shown(key, leaf.value), origins=origins)


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A value that follows from others."""

    name: str
    """`parallel.attn_dp_size`, `groups.attn_tp_group`, `rank.weight_bytes`, ..."""
    value: Any
    formula: str
    """`world_size / attn_tp_size = 16 / 2`, with the numbers."""
    unit: str = ""
    """bytes, tokens, ranks, ...; how `text` is chosen."""
    text: str = ""
    """The value for people, where `value` is not enough: `436 MiB`, `{0-7} {8-15}`."""
    is_at_most: bool = False
    """Whether it is a bound: a device with less memory has less."""
    is_recorded: bool = False
    """Whether a run has found it, so that it follows from the memory of a machine, too."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that can be said of a configuration without running it."""

    title: str
    """What the user named: the overrides, the file or the run directory."""
    role: str | None = None
    choices: Mapping[str, str | None] = field(default_factory=dict)
    """Group -> option; empty where it is not known."""
    choosers: Mapping[str, tuple[Origin, ...]] = field(default_factory=dict)
    """Group -> all who chose an option of it, the last one won; empty where it is not known."""
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    """Dotted key -> value, in the schema's order. An empty list or dictionary is a leaf; entries
    of a dictionary are leaves of their own, a list is one leaf."""
    derived: tuple[Derived, ...] = ()
    faults: tuple[str, ...] = ()
    """Rules that it breaks; then `derived` may be empty."""
    left_out: tuple[str, ...] = ()
    """Those of `faults` that are of overrides which do not compose: the leaves are without them."""
    axes: Mapping[str, str] = field(default_factory=dict)
    """Key or group -> values that a file of conf/sweep sweeps; the leaves have none of them."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be found out, and why."""
    metrics: Mapping[str, Any] | None = None
    """metrics.json of a run directory."""
    circumstances: Mapping[str, str] = field(default_factory=dict)
    """With what a run was made: `version torch` -> `2.13.0`; empty where nothing has run."""

    def __post_init__(self) -> None:
        """Secrets never get into a snapshot, whatever it was taken from."""
        shown_leaves = {key: _shown_leaf(key, leaf) for key, leaf in self.leaves.items()}
        object.__setattr__(self, "leaves", shown_leaves)
        object.__setattr__(self, "title", hide(without_typed(self.title)))

    def to_json(self) -> dict[str, Any]:
        """Plain data with the version of this layout."""
        return {"version": SNAPSHOT_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Snapshot":
        """The inverse of `to_json`."""
        leaves = {
            key: Leaf(value=leaf["value"], origins=tuple(Origin(**one) for one in leaf["origins"]))
            for key, leaf in data["leaves"].items()
        }
        return cls(
            title=data["title"],
            role=data["role"],
            choices=data["choices"],
            choosers={
                group: tuple(Origin(**one) for one in found)
                for group, found in data.get("choosers", {}).items()
            },
            leaves=leaves,
            derived=tuple(Derived(**one) for one in data["derived"]),
            faults=tuple(data["faults"]),
            left_out=tuple(data.get("left_out", ())),
            axes=data.get("axes", {}),
            warnings=tuple(data["warnings"]),
            notes=tuple(data["notes"]),
            metrics=data["metrics"],
            circumstances=data.get("circumstances", {}),
        )
