"""What a sweeper that searches may try, checked at its edges before the first trial.

A search lays out no grid. Each axis alone takes all values of a choice, and both ends of an
interval or a range (whose end a search may try, other than a grid), while the other axes have their
first value; one more cell has the last value of every axis.
"""

from collections.abc import Mapping, Sequence

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf

from inferkit.config.faults import Cell, Fault, Fix, key_of
from inferkit.config.grid import own_sweep_fault
from inferkit.config.overrides import syntax_fault
from inferkit.config.space import ConfigSpace
from inferkit.config.sweep_rules import is_higher_better

GRID_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def is_search(hydra: DictConfig) -> bool:
    """Whether something else than Hydra's own sweeper chooses the values."""
    return str(hydra.sweeper._target_) != GRID_SWEEPER


def probes(
    space: ConfigSpace, overrides: Sequence[str], params: Mapping[str, str]
) -> tuple[list[Cell], list[Fault]]:
    """Cells at the edges of what may be tried, or the faults that keep it from being known.

    Args:
        params: `hydra.sweeper.params`.
    """
    faults: list[Fault] = []
    axes: dict[str, list[str]] = {}
    for text in [*(f"{key}={value}" for key, value in params.items()), *overrides]:
        fault = syntax_fault(space, text) or own_sweep_fault(space, text)
        if fault is not None:
            faults.append(fault)
            continue
        override = space.parse(text)
        if not override.is_hydra_override():
            # A value on the command line takes the place of one in a file.
            axes[override.key_or_group] = _words(override)
    if faults:
        return [], faults
    rows = [[words[0] for words in axes.values()]]
    for place, words in enumerate(axes.values()):
        rows += [[*rows[0][:place], word, *rows[0][place + 1 :]] for word in words[1:]]
    rows.append([words[-1] for words in axes.values()])
    distinct = dict.fromkeys(tuple(row) for row in rows)
    return [Cell(number=number, overrides=row) for number, row in enumerate(distinct)], []


def searched_keys(
    space: ConfigSpace, overrides: Sequence[str], params: Mapping[str, str]
) -> list[str]:
    """Keys of which a search that has passed its checks tries more than one value."""
    texts = {key_of(text): text for text in [*(f"{k}={v}" for k, v in params.items()), *overrides]}
    return [key for key, text in texts.items() if space.parse(text).is_sweep_override()]


def direction_fault(hydra: DictConfig, objective: str) -> Fault | None:
    """Why the search would find the worst cell: its direction is not that of the objective."""
    given = OmegaConf.select(hydra, "sweeper.direction")
    name = str(getattr(given, "name", given))
    better, wanted = ("more", "maximize") if is_higher_better(objective) else ("less", "minimize")
    if name not in ("maximize", "minimize") or name == wanted:
        return None
    key = "hydra.sweeper.direction"
    problem = f"looks for the worst cell: of {objective}, the objective, {better} is better"
    fix = Fix(add=(f"{key}={wanted}",))
    return Fault(key=key, given=f"{key}={name}", problem=problem, fix=fix)


def _words(override: Override) -> list[str]:
    """`key=value` of the edges of one axis, rising; one word where it has one value."""
    key, value = override.get_key_element(), override.value()
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if isinstance(value, IntervalSweep):
        return [f"{key}={end}" for end in dict.fromkeys((value.start, value.end))]
    if isinstance(value, RangeSweep):
        assert value.start is not None and value.stop is not None, "a range has two ends"
        last = value.start + (value.stop - value.start) // value.step * value.step
        return [f"{key}={end}" for end in dict.fromkeys((value.start, last))]
    return [f"{key}={one}" for one in override.sweep_string_iterator()]
