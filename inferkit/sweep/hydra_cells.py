"""A sweep that a launcher or sweeper plugin of Hydra drives: each of its jobs is a cell.

What runs a cell is the same as without a plugin, on whatever machine its job lands. The folders are
those that Hydra makes.
"""

import math
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from inferkit.config.arguments import Arguments
from inferkit.config.check import Checker
from inferkit.config.faults import Cell
from inferkit.config.grid import with_load
from inferkit.config.recorded import task_overrides
from inferkit.config.sweep_rules import objective_of, slo_limits
from inferkit.online.cluster.supervisor import collected
from inferkit.sweep.cell_run import CellRun
from inferkit.sweep.cells import OK, JobResult, read_result
from inferkit.sweep.loop import invalid_result, run_keys
from inferkit.sweep.outcomes import read_outcome
from inferkit.sweep.plan import PlannedCell, cell_words
from inferkit.sweep.trials import take_equal

BASIC = {
    "launcher": "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "sweeper": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
}
"""Classes of Hydra whose work the loop of this package does."""


def is_driven_by_plugin(cfg: DictConfig) -> bool:
    """Args:
    cfg: of the sweep itself.
    """
    return any(cfg.hydra[name]._target_ != target for name, target in BASIC.items())


@dataclass(frozen=True, kw_only=True)
class HydraCell:
    """Hydra's task function; it travels to other machines, so it holds nothing but words."""

    arguments: Arguments
    """Of the sweep."""

    def __call__(self, cfg: DictConfig) -> Any:
        """Run a cell, unless its folder holds the result already.

        Returns what the sweeper wants: a number for one that searches (where the cell has none,
        words that say so), else the metrics.

        Raises:
            KeyboardInterrupt, SystemExit: a signal came; the result says so.
        """
        hydra_cfg = HydraConfig.get()
        cell = planned_cell(
            self.arguments,
            number=int(hydra_cfg.job.num),
            overrides=task_overrides(hydra_cfg),
            folder=Path(hydra_cfg.runtime.output_dir),
        )
        signals: list[int] = []
        is_search = hydra_cfg.sweeper._target_ != BASIC["sweeper"]
        sweep_dir = Path(hydra_cfg.runtime.cwd) / hydra_cfg.sweep.dir
        with collected(signals):
            result = self._result(cell, signals, sweep_dir if is_search else None)
        for number in signals:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if not is_search:
            return result.metrics
        value = objective_value(cell, result)
        # Optuna's sweeper breaks off at nan, and counts what is no number as a failed trial.
        return f"no result ({result.status})" if math.isnan(value) else value

    def _result(self, cell: PlannedCell, signals: list[int], search_dir: Path | None) -> JobResult:
        """Args:
        search_dir: of the sweep, where it is a search.
        """
        if cell.config is None:
            result = invalid_result(cell)
            result.write(cell.folder)
            return result
        key = run_keys([cell]).get(cell.number)
        known = read_result(cell.folder)
        if known is not None and known.status == OK and key and known.run_key == key:
            return known
        equal = take_equal(cell, key, search_dir) if key and search_dir is not None else None
        if equal is not None:
            text = f"inferkit: cell #{cell.number} {equal.status}: these values have run before"
            print(text, file=sys.stderr)
            return equal
        timeout_s = cell.config.sweep.cell_timeout_s
        result = CellRun(cell, timeout_s=timeout_s, signals=signals).run(run_key=key)
        text = f"inferkit: cell #{cell.number} {result.status} after {result.seconds:.1f} s"
        print(f"{text}: {result.error}" if result.error else text, file=sys.stderr)
        return result


def planned_cell(
    arguments: Arguments, *, number: int, overrides: tuple[str, ...], folder: Path
) -> PlannedCell:
    """The cell of a job, checked where it runs."""
    space = arguments.space()
    cell = with_load(space, Cell(number=number, overrides=overrides))
    checked = Checker(space).check_overrides(cell.overrides)
    return PlannedCell(
        number=number,
        overrides=cell.overrides,
        folder=folder,
        words=cell_words(arguments, cell.overrides, folder),
        config=checked.config,
        faults=checked.faults,
    )


def objective_value(cell: PlannedCell, result: JobResult) -> float:
    """The objective of a cell; nan where it has none."""
    if cell.config is None or result.status != OK:
        return math.nan
    limits = slo_limits(cell.config.sweep.slo)
    value = read_outcome(cell.folder, limits).number_of(objective_of(cell.config))
    return math.nan if value is None else value
