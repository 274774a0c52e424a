"""What a sweeper that searches may try, checked at its edges before the first trial.

A search lays out no grid. Each axis alone takes all values of a choice, and both ends of an
interval or a range (whose end a search may try, other than a grid), while the other axes have their
first value; one more cell has the last value of every axis.
"""

from collections.abc import Mapping, Sequence

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf

from inferkit.config.faults import Cell, Fault, Fix, key_of
from inferkit.config.grid import parse_axes
from inferkit.config.space import ConfigSpace
from inferkit.config.sweep_rules import is_higher_better

GRID_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
OPTUNA = "hydra_plugins.hydra_optuna_sweeper."
DIRECTIONS = ("maximize", "minimize")
AT_LEAST_ONE = {"n_trials": 20, "n_jobs": 1}
"""Settings of Optuna's sweeper -> a value to begin with."""


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
    parsed, faults = parse_axes(space, overrides, params)
    if faults:
        return [], faults
    # A value on the command line takes the place of one in a file.
    axes = {override.key_or_group: _words(override) for override in parsed}
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


def search_faults(hydra: DictConfig, objective: str) -> list[Fault]:
    """Settings of the sweeper with which the search would break off, or find the worst cell."""
    direction = direction_fault(hydra, objective)
    faults = [] if direction is None else [direction]
    if not str(hydra.sweeper._target_).startswith(OPTUNA):
        return faults
    for name, default in AT_LEAST_ONE.items():
        key, value = f"hydra.sweeper.{name}", OmegaConf.select(hydra, f"sweeper.{name}")
        if isinstance(value, int) and value < 1:
            problem = "is out of range; allowed is an integer >= 1"
            fix = Fix(add=(f"{key}={default}",))
            faults.append(Fault(key=key, given=f"{key}={value}", problem=problem, fix=fix))
    key = "hydra.sweeper.max_failure_rate"
    rate = OmegaConf.select(hydra, "sweeper.max_failure_rate")
    if isinstance(rate, float) and not 0 <= rate <= 1:
        problem = "is out of range; allowed is a number from 0 to 1"
        fix = Fix(drop=(key,))
        faults.append(Fault(key=key, given=f"{key}={rate:g}", problem=problem, fix=fix))
    return faults


def direction_fault(hydra: DictConfig, objective: str) -> Fault | None:
    """Why the search has no direction, or would find the worst cell: that of another objective."""
    given = OmegaConf.select(hydra, "sweeper.direction")
    name = str(getattr(given, "name", given))
    better, wanted = ("more", "maximize") if is_higher_better(objective) else ("less", "minimize")
    key = "hydra.sweeper.direction"
    if given is None or name == wanted:
        return None
    if name not in DIRECTIONS:
        problem = f"is no direction of a search; allowed: {', '.join(DIRECTIONS)}"
        return Fault(
            key=key, given=f"{key}={name}", problem=problem, fix=Fix(add=(f"{key}={wanted}",))
        )
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
