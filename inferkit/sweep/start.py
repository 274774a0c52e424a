"""From the words of a sweep to its end: checked, run, summed up."""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from inferkit.config.arguments import Arguments, parse_arguments, program_name
from inferkit.config.faults import Command, Fix, key_of
from inferkit.config.preflight import Verdict, preflight
from inferkit.config.run_folder import SWEEPS, make_run_folder
from inferkit.config.schema import OnFailure
from inferkit.config.search_space import searched_keys
from inferkit.core.errors import ConfigError
from inferkit.core.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_REFUSED
from inferkit.runtime.logs import quiet_libraries
from inferkit.runtime.place import find_node
from inferkit.sweep.cells import read_result
from inferkit.sweep.hydra_cells import HydraCell, is_driven_by_plugin, planned_cell
from inferkit.sweep.hydra_main import call_hydra, hydra_words
from inferkit.sweep.loop import new_record, run_keys, run_sweep
from inferkit.sweep.outcomes import read_outcomes
from inferkit.sweep.plan import SWEEP_DIR, compose_multirun, plan_cells, quoted, sweep_dir_of
from inferkit.sweep.record import SWEEP_FILE, now_text, read_record
from inferkit.sweep.reuse import EARLIER, earlier_folders, one_at_a_time, reuse_results
from inferkit.sweep.summary import summarise
from inferkit.sweep.trials import are_current, is_finished, set_trials_aside, trial_folders


def start_sweep(arguments: Arguments, verdict: Verdict) -> int:
    """Run the cells of a sweep that has passed its checks, and sum up; returns the exit code.

    Raises:
        ConfigError: the folder of the sweep cannot be used, or this machine is no node of it.
    """
    configs = [checked.config for checked in verdict.checked if checked.config is not None]
    node_rank = max((find_node(config.parallel).node_rank for config in configs), default=0)
    for warning in verdict.warnings:
        _tell(f"warning: {warning}")
    if verdict.notice:
        _tell(verdict.notice)
    cfg = compose_multirun(arguments, None if _is_given(arguments) else _own_folder())
    if is_driven_by_plugin(cfg):
        return _drive_by_plugin(arguments, verdict, cfg)
    sweep = run_sweep(arguments, verdict, cfg, node_rank=node_rank)
    code = sum_up(sweep.sweep_dir) if node_rank == 0 else _code(sweep.num_bad == 0)
    for number in sweep.signals:
        return EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number
    return code


def resume_sweep(sweep_dir: Path, more: Sequence[str] = (), flags: Sequence[str] = ()) -> int:
    """Run what is missing of a sweep; returns the exit code.

    Args:
        more: overrides, each in the place of one with the same key.
        flags: beside those of the sweep.

    Raises:
        ConfigError: `sweep_dir` is not that of a sweep.
    """
    record, sweep_dir = read_record(sweep_dir), sweep_dir.absolute()
    words = Command(overrides=record.overrides).fixed(Fix(add=(text,)) for text in more).overrides
    if Path(record.cwd).is_dir():
        os.chdir(record.cwd)
        sys.path.append(record.cwd)  # a user's own components may lie there
    else:
        _tell(f"warning: {record.cwd} is gone, where the sweep was started; paths are of here")
    folder = f"{SWEEP_DIR}={quoted(str(sweep_dir))}"
    arguments = parse_arguments([*record.flags, *flags, *words, folder])
    command = arguments.command(program_name())
    _tell(f"inferkit: resuming {command}")
    verdict = preflight(command, arguments.space())
    if not verdict.is_good:
        # A whole command with another grid would replace the sweep of this folder if it is copied.
        _tell(verdict.message.partition("\nthis works")[0].rstrip())
        again = Command(program=program_name(), verb="resume", overrides=(str(sweep_dir),))
        _tell(f"\ncorrect the words after the folder:\n  {again} ...")
        return EXIT_REFUSED
    return start_sweep(arguments, verdict)


def _is_given(arguments: Arguments) -> bool:
    return any(key_of(text) == SWEEP_DIR for text in arguments.overrides)


def _own_folder() -> Path:
    try:
        return make_run_folder(SWEEPS, datetime.now())
    except OSError as error:
        raise ConfigError(
            f"cannot make a run folder: {error}; set {SWEEP_DIR}=/a/writable/folder"
        ) from error


def _drive_by_plugin(arguments: Arguments, verdict: Verdict, cfg: DictConfig) -> int:
    """Let Hydra's main drive, and sum up whatever comes of it; returns the exit code."""
    sweep_dir = sweep_dir_of(cfg)
    if OmegaConf.select(cfg, "sweep.on_failure") is OnFailure.stop:
        _tell(
            "warning: sweep.on_failure=stop: has no effect with a launcher or sweeper plugin, "
            "which decides by itself what it starts"
        )
    sweep_dir.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(sweep_dir):
        cells = plan_cells(arguments, verdict, cfg, sweep_dir) if verdict.cells else []
        if cells:
            reuse_results(cells, run_keys(cells), earlier_folders(sweep_dir, cells), sweep_dir)
        elif _is_finished(arguments, cfg, sweep_dir):
            return sum_up(sweep_dir)
        elif num_earlier := set_trials_aside(sweep_dir):
            trials = (
                "1 earlier trial is" if num_earlier == 1 else f"{num_earlier} earlier trials are"
            )
            _tell(
                f"inferkit: the search begins anew: {trials} in {sweep_dir / EARLIER}, of which "
                "it takes the result where it comes to the same values"
            )
        config = next(checked.config for checked in verdict.checked if checked.config is not None)
        params = OmegaConf.select(cfg, "hydra.sweeper.params") or {}
        named = {str(key): str(value) for key, value in params.items()}
        axes = [] if cells else searched_keys(arguments.space(), arguments.overrides, named)
        record = new_record(arguments, sweep_dir, cells=cells, config=config, axes=axes)
        record.write(sweep_dir)
        _tell(f"inferkit: sweep in {sweep_dir}")
        words = [] if _is_given(arguments) else [f"{SWEEP_DIR}={quoted(str(sweep_dir))}"]
        quiet_libraries()
        try:
            call_hydra(HydraCell(arguments=arguments), arguments, hydra_words(arguments, *words))
        except (SystemExit, KeyboardInterrupt):  # a signal, or the plugin gave up
            sum_up(sweep_dir)
            raise
        folders = [] if cells else trial_folders(sweep_dir)
        trials_run = tuple(folder.relative_to(sweep_dir).as_posix() for folder in folders)
        replace(record, trials=trials_run, ended_at=now_text()).write(sweep_dir)
        return sum_up(sweep_dir)


def _is_finished(arguments: Arguments, cfg: DictConfig, sweep_dir: Path) -> bool:
    """Whether the folder holds this very search, with results of today; says so."""
    if not (sweep_dir / SWEEP_FILE).exists():
        return False
    record = read_record(sweep_dir)
    overrides = [text for text in arguments.overrides if key_of(text) != SWEEP_DIR]
    num_trials = int(OmegaConf.select(cfg, "hydra.sweeper.n_trials") or 0)
    if not is_finished(record, overrides, arguments.flags, num_trials):
        return False
    trials = []
    for folder in (sweep_dir / name for name in record.trials):
        result = read_result(folder)
        if result is None:
            return False
        number, given = result.number, result.overrides
        trials.append(planned_cell(arguments, number=number, overrides=given, folder=folder))
    if not are_current(trials, run_keys(trials)):
        return False
    _tell(
        f"inferkit: the search in {sweep_dir} is finished and nothing of it has changed: nothing "
        f"is run; for another search choose another folder ({SWEEP_DIR}=...)"
    )
    return True


def sum_up(sweep_dir: Path) -> int:
    """Print the summary of a sweep and write its files; returns the exit code."""
    if not read_outcomes(sweep_dir):
        _tell(f"inferkit: no cell has been run in {sweep_dir}")
        return EXIT_FAILED
    summary = summarise(sweep_dir)
    summary.print()
    if summary.num_failed:
        command = Command(program=program_name(), verb="resume", overrides=(str(sweep_dir),))
        _tell(f"inferkit: to run what has not ended ok: {command}")
    return _code(summary.num_failed == 0)


def _code(is_ok: bool) -> int:
    return EXIT_OK if is_ok else EXIT_FAILED


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
