"""A sweep on this machine: its cells one after the other, each a plain single run of its own.

What it comes to is made from the files that the cells leave.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from omegaconf import DictConfig, OmegaConf

from inferkit.config.arguments import Arguments, program_name
from inferkit.config.faults import key_of
from inferkit.config.identity import RunKeys
from inferkit.config.preflight import Verdict
from inferkit.config.provenance import plain
from inferkit.config.schema import InferenceConfig, OnFailure
from inferkit.core.errors import ConfigError
from inferkit.online.cluster.supervisor import collected
from inferkit.sweep.cell_run import CellRun
from inferkit.sweep.cells import INVALID, OK, JobResult, cells_text
from inferkit.sweep.display import SweepDisplay, sweep_display
from inferkit.sweep.leftovers import adopted_orphans
from inferkit.sweep.plan import SWEEP_DIR, PlannedCell, plan_cells, sweep_dir_of
from inferkit.sweep.record import SWEEP_FILE, SweepRecord, now_text
from inferkit.sweep.reuse import (
    EARLIER,
    earlier_folders,
    has_ended_ok,
    one_at_a_time,
    reuse_results,
)

MULTIRUN_FILE = "multirun.yaml"


def run_sweep(
    arguments: Arguments, verdict: Verdict, cfg: DictConfig, *, node_rank: int = 0
) -> "Sweep":
    """Run all cells that are not finished; returns what was done.

    Args:
        cfg: of the sweep itself.

    Raises:
        ConfigError: the folder cannot be used.
    """
    sweep_dir = sweep_dir_of(cfg)
    cells = plan_cells(arguments, verdict, cfg, sweep_dir)
    sweep_dir.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(
        arguments=arguments, cells=cells, cfg=cfg, sweep_dir=sweep_dir, node_rank=node_rank
    )
    with contextlib.ExitStack() as stack:
        if node_rank == 0:  # the folder may be shared by all nodes, and is the first one's
            stack.enter_context(one_at_a_time(sweep_dir))
        stack.enter_context(collected(sweep.signals))
        sweep.run()
    return sweep


@dataclass(kw_only=True)
class Sweep:
    """One start of a sweep."""

    arguments: Arguments
    cells: Sequence[PlannedCell]
    cfg: DictConfig
    """Of the sweep itself."""
    sweep_dir: Path
    node_rank: int = 0
    signals: list[int] = field(default_factory=list)
    """Received: the first ends the sweep after its cell has ended, which it is told to."""
    finished: set[int] = field(default_factory=set)
    """Cells that an earlier start has run."""
    num_outdated: int = 0
    """Results of an earlier start that no cell wants, or that something has changed for."""
    num_bad: int = 0
    """Cells that this start has run, and that did not end well."""

    def run(self) -> None:
        """Start every cell that is due, in order, until one asks for the end."""
        if self.node_rank == 0:
            self._prepare()
        due = [cell for cell in self.cells if cell.config and cell.number not in self.finished]
        callbacks, name = Callbacks(self.cfg), self.arguments.config_name
        callbacks.on_multirun_start(config=self.cfg, config_name=name)
        with sweep_display(self.cells, len(due)) as display, adopted_orphans() as end_leftovers:
            self._announce(display, len(due))
            for cell in due:
                if self.signals:
                    break
                result = self._run_cell(cell, display)
                end_leftovers()
                self.num_bad += result.status != OK
                if result.status != OK and self._any_config.sweep.on_failure is OnFailure.stop:
                    display.tell("inferkit: no further cell is started (sweep.on_failure=stop)")
                    break
        callbacks.on_multirun_end(config=self.cfg, config_name=name)
        if self.node_rank == 0:
            replace(self._record, ended_at=now_text()).write(self.sweep_dir)

    @property
    def _any_config(self) -> InferenceConfig:
        """Of a cell; what concerns the sweep is the same in all."""
        return next(cell.config for cell in self.cells if cell.config is not None)

    def _prepare(self) -> None:
        """Find what is finished, and record what is asked for."""
        if len(self._any_config.parallel.node_ips) > 1:
            self._check_new()
        else:
            self._reuse()
        OmegaConf.save(self.cfg, self.sweep_dir / MULTIRUN_FILE)
        self._record = new_record(
            self.arguments, self.sweep_dir, cells=self.cells, config=self._any_config
        )
        self._record.write(self.sweep_dir)
        for cell in self.cells:
            if cell.config is None:
                invalid_result(cell).write(cell.folder)

    def _reuse(self) -> None:
        """Take over what an earlier start has finished."""
        folders = earlier_folders(self.sweep_dir, self.cells)
        if folders:
            num_ok = sum(has_ended_ok(folder) for folder in folders)
            keys = run_keys(self.cells)
            self.finished = reuse_results(self.cells, keys, folders, self.sweep_dir)
            self.num_outdated = num_ok - len(self.finished)

    def _check_new(self) -> None:
        """Other nodes may have begun already to use the folder, so its cells tell nothing."""
        if (self.sweep_dir / SWEEP_FILE).exists():
            raise ConfigError(
                f"{self.sweep_dir} is of an earlier start, and a sweep over several nodes cannot "
                "be resumed: every node would have to find the same cells finished; choose another "
                f"folder ({SWEEP_DIR}=...)"
            )

    def _announce(self, display: SweepDisplay, num_due: int) -> None:
        text = f"inferkit: sweep of {cells_text(len(self.cells))} in {self.sweep_dir}"
        if self.finished:
            text += f"; {len(self.finished)} are finished already"
        if num_due < len(self.cells):
            text += f"; {num_due} to run"
        display.tell(text)
        if self.num_outdated:
            are = "result is" if self.num_outdated == 1 else "results are"
            display.tell(
                f"inferkit: {self.num_outdated} earlier {are} of no cell as it is now: the grid, "
                "the configuration, the code, or files of the model or data set have changed; see "
                f"{self.sweep_dir / EARLIER}"
            )

    def _run_cell(self, cell: PlannedCell, display: SweepDisplay) -> JobResult:
        display.begin(cell)
        run = CellRun(
            cell,
            timeout_s=self._any_config.sweep.cell_timeout_s,
            signals=self.signals,
            on_progress=display.show,
            node_rank=self.node_rank,
        )
        result = run.run(run_key=run_keys([cell]).get(cell.number))
        display.end(cell, result)
        return result


def new_record(
    arguments: Arguments,
    sweep_dir: Path,
    *,
    cells: Sequence[PlannedCell],
    config: InferenceConfig,
    axes: Sequence[str] = (),
) -> SweepRecord:
    """Of a sweep that starts now.

    Args:
        cells: all of the grid; none of a search, which has no grid.
        config: of any cell.
        axes: keys that a search varies.
    """
    return SweepRecord(
        command=str(arguments.command(program_name())),
        flags=arguments.flags,
        overrides=tuple(text for text in arguments.overrides if key_of(text) != SWEEP_DIR),
        cwd=str(Path.cwd()),
        sweep=plain(config)["sweep"],
        cells=[
            {
                "number": cell.number,
                "folder": cell.folder.relative_to(sweep_dir).as_posix(),
                "overrides": list(cell.overrides),
            }
            for cell in cells
        ],
        axes=tuple(axes),
        started_at=now_text(),
    )


def invalid_result(cell: PlannedCell) -> JobResult:
    """Of a cell that is left out."""
    text = "\n".join(str(fault) for fault in cell.faults)
    return JobResult(
        number=cell.number,
        overrides=cell.overrides,
        status=INVALID,
        error=" ".join(text.split()),
        traceback=text,
    )


def run_keys(cells: Iterable[PlannedCell]) -> dict[int, str]:
    """Number -> run_key, as things are now; cells whose files cannot be read have none."""
    keys, found = RunKeys(), {}
    for cell in cells:
        if cell.config is not None:
            with contextlib.suppress(OSError):
                found[cell.number] = keys.key(cell.config)
    return found
