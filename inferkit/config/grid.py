"""The cells of a sweep, numbered as Hydra's basic sweeper numbers them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

from inferkit.config.faults import Cell, Fault, Fix, key_of
from inferkit.config.keys import accepts_integer, find_key
from inferkit.config.overrides import LOADED_ROLES, syntax_fault
from inferkit.config.space import ConfigSpace

SWEEP = "sweep"
"""Node and group of what concerns a sweep as a whole."""
RUNNER, LOAD = "runner", "load"


def expand(
    space: ConfigSpace, overrides: Sequence[str], params: Mapping[str, str]
) -> tuple[list[Cell], list[Fault]]:
    """Cells of the job's overrides, or the faults that keep the grid from being laid out.

    Args:
        params: `hydra.sweeper.params`, the axes of a sweep that is written in a file.
    """
    parsed, faults = parse_axes(space, overrides, params)
    if faults:
        return [], faults
    try:
        rows = BasicSweeper.split_arguments(parsed, None)[0]
    except HydraException:
        # Only an interval has no values that could be counted.
        intervals = [o for o in parsed if o.is_interval_sweep()]
        problem = "has no single values; name them (0.5,0.9), give a range(1,5), or search it with "
        problem += "hydra/sweeper=optuna"
        return [], [
            Fault(
                key=o.key_or_group,
                given=o.input_line or "",
                problem=problem,
                fix=_counted(space, o),
            )
            for o in intervals
        ]
    if not rows:
        return [], [_without_values(space, o) for o in parsed if _is_empty(o)]
    return [Cell(number=n, overrides=tuple(row)) for n, row in enumerate(rows)], []


def parse_axes(
    space: ConfigSpace, overrides: Sequence[str], params: Mapping[str, str]
) -> tuple[list[Override], list[Fault]]:
    """The job's overrides, those of `params` first, or what is wrong with any.

    Args:
        params: `hydra.sweeper.params`.
    """
    parsed, faults = [], []
    for text in [*(f"{key}={value}" for key, value in params.items()), *overrides]:
        fault = syntax_fault(space, text) or own_sweep_fault(space, text)
        if fault is not None:
            faults.append(fault)
        elif not space.parse(text).is_hydra_override():
            parsed.append(space.parse(text))
    return parsed, faults


def _counted(space: ConfigSpace, override: Override) -> Fix:
    """An axis of single values in the place of an interval; of real numbers nobody knows which."""
    interval, key = override.value(), override.get_key_element()
    assert isinstance(interval, IntervalSweep), "only an interval is asked for"
    start, end = interval.start, interval.end
    hint = find_key(space.compose_job(), override.key_or_group).hint
    if accepts_integer(hint) and start is not None and end is not None and int(start) < int(end):
        return Fix(add=(f"{key}=range({int(start)},{int(end)})",))
    return Fix(drop=(key_of(override.input_line or ""),))


def own_sweep_fault(space: ConfigSpace, text: str) -> Fault | None:
    """What is wrong with several values of a key that is of the sweep itself."""
    override = space.parse(text)
    key = override.key_or_group
    is_own = override.is_hydra_override() or key.partition(".")[0] == SWEEP
    if not (is_own and override.is_sweep_override()):
        return None
    own = "Hydra's own settings are" if override.is_hydra_override() else "is"
    problem = f"{own} the same in every cell; give one value"
    fix = None
    if override.is_discrete_sweep():
        first = next(override.sweep_string_iterator())
        fix = Fix(add=(f"{override.get_key_element()}={first}",))
    return Fault(key=key, given=text, problem=problem, fix=fix)


def _is_empty(override: Override) -> bool:
    return override.is_sweep_override() and not list(override.sweep_string_iterator())


def _without_values(space: ConfigSpace, override: Override) -> Fault:
    """An axis of no value: a pattern that no option has, a range that is empty."""
    key, problem = override.key_or_group, "has no values, so the sweep has no cells"
    if space.is_group(key):
        problem = f"matches no option\noptions of {key}: {', '.join(space.options(key))}"
    fix = Fix(drop=(key,))
    return Fault(key=key, given=override.input_line or "", problem=problem, fix=fix)


def with_load(space: ConfigSpace, cell: Cell) -> Cell:
    """The cell; where it is a role that would serve without an end, with a load on it.

    A runner of the user's choice stays.
    """
    words = {key_of(text): text.partition("=")[2] for text in cell.overrides}
    has_runner = any(key.partition(".")[0] == RUNNER for key in words)
    if words.get("role") not in LOADED_ROLES or has_runner or LOAD not in space.options(RUNNER):
        return cell
    return replace(cell, overrides=(*cell.overrides, f"{RUNNER}={LOAD}"))


def narrowed(
    space: ConfigSpace, overrides: Sequence[str], good: Sequence[Cell], *, is_search: bool = False
) -> tuple[Fix, ...] | None:
    """Fixes that leave of every axis the values of good cells; None where an axis gets empty.

    Args:
        is_search: the cells have the edges of ranges only.
    """
    kept = {text for cell in good for text in cell.overrides}
    fixes = []
    for text in overrides:
        override = space.parse(text)
        if not override.is_discrete_sweep() or (is_search and not override.is_choice_sweep()):
            continue
        key = override.get_key_element()
        values = list(override.sweep_string_iterator())
        usable = [value for value in values if f"{key}={value}" in kept]
        if not usable:
            return None
        if len(usable) < len(values):
            fixes.append(Fix(add=(f"{key}={','.join(usable)}",)))
    return tuple(fixes)
