"""Takes snapshots: of overrides, also of those that have faults."""

from collections.abc import Mapping, Sequence

from inferkit.config.automatic import with_automatic
from inferkit.config.axes import swept
from inferkit.config.check import Checked, Checker
from inferkit.config.choices import find_choosers
from inferkit.config.leaves import flat, unresolved
from inferkit.config.origins import Origin, find_origins
from inferkit.config.overrides import compose_checked
from inferkit.config.provenance import plain
from inferkit.config.resolve import resolve_automatic
from inferkit.config.schema import InferenceConfig
from inferkit.config.secrets import secret_faults
from inferkit.config.space import ConfigSpace
from inferkit.config.walk import structure_faults
from inferkit.core.parallel_layout import layout_faults
from inferkit.inspect.derived import derived_of
from inferkit.inspect.snapshot import Leaf, Snapshot

NO_MODEL_FILES = (
    "the model's files are not here, so what a rank holds of it, and a context taken from it, are "
    "not known"
)


def take_snapshot(
    overrides: Sequence[str],
    space: ConfigSpace,
    *,
    title: str = "",
    num_blocks: Mapping[str, int] | None = None,
) -> Snapshot:
    """What these overrides come to; nothing is started and no device is needed.

    Args:
        overrides: of one run, without sweep values. Those that do not compose are told as faults,
            and the snapshot is of the others.
        title: how the user named it; empty = the overrides.
        num_blocks: pool -> blocks of the KV cache of a rank that ran; None = nothing has run.
    """
    checker = Checker(space, is_run=False, asks_host=False)
    checked = checker.check_overrides(overrides)
    composition = compose_checked(space, overrides)
    written = unresolved(composition.cfg)
    origins: Mapping[str, tuple[Origin, ...]] = find_origins(space, composition.used)
    composed = checked.composed
    assert composed is not None, "a check composes"
    resolved = checked.sized or _resolved(composed, checked)
    values = flat(plain(resolved))
    origins = with_automatic(origins, resolved)
    for fault in (*structure_faults(composition.cfg), *secret_faults(composition.cfg)):
        if fault.key in written:  # its value is only a harmless one now
            values[fault.key] = written[fault.key]
    notes = []
    if checked.sized is not None and checked.files.arch is None:
        notes.append(NO_MODEL_FILES)
    axes = swept(composition.hydra, composition.used)
    notes += [axis_note(name, values) for name, values in axes.items()]
    return Snapshot(
        title=title or " ".join(overrides) or "defaults",
        role=composed.role,
        choices=_choices(composition.hydra.runtime.choices),
        choosers=find_choosers(space, composition.used),
        leaves={key: Leaf(value=v, origins=origins.get(key, ())) for key, v in values.items()},
        derived=derived_of(checked, num_blocks=num_blocks),
        faults=tuple(map(str, checked.faults)),
        left_out=tuple(map(str, composition.faults)),
        axes=axes,
        warnings=tuple(map(str, checked.warnings)),
        notes=tuple(notes),
    )


def axis_note(name: str, values: str) -> str:
    """What one value of a swept key, or one option of a swept group, must be read with."""
    return f"{name} is an axis of a sweep: {values}; shown is what it has where nothing is swept"


def _resolved(composed: InferenceConfig, checked: Checked) -> InferenceConfig:
    """Automatic values of a configuration with faults, where its sizes allow that."""
    if any(layout_faults(composed.parallel)):
        return composed
    arch = checked.files.arch
    return resolve_automatic(composed, context_len=int(arch.max_context_len) if arch else 0)


def _choices(known: Mapping[str, str | None]) -> dict[str, str | None]:
    """Group -> option, without Hydra's own groups; in the order of the defaults list."""
    groups = [str(group) for group in known if not str(group).startswith("hydra/")]
    return {group: known[group] for group in reversed(groups)}
