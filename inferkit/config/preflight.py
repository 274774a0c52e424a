"""The check before anything is started: all faults of a command at once, and one that works."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from inferkit.config.check import Checked, Checker
from inferkit.config.fault_places import with_places
from inferkit.config.faults import (
    Cell,
    Command,
    Fault,
    Fix,
    key_of,
    render,
    render_cells,
    shared_faults,
    show,
    varying_overrides,
)
from inferkit.config.grid import expand, narrowed, with_load
from inferkit.config.group_choices import repeated_choices
from inferkit.config.no_effect import NO_EFFECT, changed_keys
from inferkit.config.overrides import Composition, compose_checked, syntax_fault
from inferkit.config.run_folder import folder_problem
from inferkit.config.schema import InferenceConfig
from inferkit.config.search_space import is_search, probes, search_faults
from inferkit.config.secrets import secret_faults
from inferkit.config.space import ConfigSpace
from inferkit.config.sweep_rules import objective_of
from inferkit.config.walk import structure_faults

MULTIRUN = ("-m", "--multirun")
ROUTER = "router"
"""A role without ranks."""
HYDRA = ("hydra.", "hydra/")
"""How keys of Hydra's own settings begin: those of a sweep are checked once, not in every cell."""
CHECK = "check"
"""The verb that runs nothing."""
AS_CELL = "hydra.mode=RUN"
"""What the command of a sweep's cell holds, so that `+sweep=NAME` begins no sweep."""
SERVING = "inferkit.online."
"""Runners that end only when they are told to."""
MAX_RANKS_PER_NODE = 80
"""So many ranks a command starts on one node: the system hands a new process 256 descriptors at a
time, of which each rank takes three."""
LAUNCHED = ("RANK", "SLURM_PROCID")
"""Variables of a process that is a rank itself: another program has started the ranks."""
MAX_CORRECTIONS = 5
"""A corrected command may show faults that others hid; so many times it is corrected again."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the pre-flight found."""

    message: str = ""
    """What to print before giving up; empty where all can run."""
    warnings: tuple[Fault, ...] = ()
    cells: tuple[Cell, ...] = ()
    """Cells of a sweep; empty for one run, and for a search."""
    probes: tuple[Cell, ...] = ()
    """Of a search: what was checked in place of all that it may try."""
    is_multirun: bool = False
    checked: tuple[Checked, ...] = ()
    """Outcome of the run, or of every cell or probe."""
    invalid: Mapping[int, tuple[Fault, ...]] = field(default_factory=dict)
    """Cells that are left out (sweep.skip_invalid) -> why."""

    @property
    def notice(self) -> str:
        """What to print before the others start: the cells that are left out; may be empty."""
        if not self.invalid:
            return ""
        cells = self.probes or self.cells
        what = "cells cannot run and are left out"
        if self.probes:
            what = "edges of the search cannot run; trials there have no result"
        title = f"inferkit: {len(self.invalid)} of {len(cells)} {what} (sweep.skip_invalid=true)"
        return render_cells(cells, self.invalid, title=title)

    @property
    def is_good(self) -> bool:
        return not self.message


@dataclass(kw_only=True)
class _Sweep:
    """Outcome of all cells of a command."""

    cells: list[Cell] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    """Faults of the command as a whole."""
    checked: dict[int, Checked] = field(default_factory=dict)
    skips_invalid: bool = False
    is_search: bool = False
    """The cells are the edges of what may be tried."""

    @property
    def by_cell(self) -> dict[int, list[Fault]]:
        return {n: list(found.faults) for n, found in self.checked.items() if found.faults}


def preflight(command: Command, space: ConfigSpace) -> Verdict:
    """Check everything that `command` would run. Nothing is created, nothing is started.

    The verb `check` looks at the configuration alone; with any other, what passes can run here.
    """
    checker = Checker(space, is_run=command.verb != CHECK)
    if _is_multirun(command, space):
        return _preflight_sweep(command, checker)
    checked = _check(command.overrides, checker)
    faults = [*checked.faults, *_folder_faults(command, space, "hydra.run.dir")]
    if not faults:
        unused = [*_of_sweeps(command, checked), *_unused_folders(command, "hydra.sweep")]
        return Verdict(warnings=(*checked.warnings, *unused), checked=(checked,))
    works, is_example = _corrected(command, faults, checker)
    used = compose_checked(space, command.overrides).used
    faults = with_places(space, command.overrides, faults, used=used)
    message = render(faults, works=works, is_example=is_example)
    return Verdict(message=message, checked=(checked,))


def _merged(warnings: Iterable[Fault]) -> tuple[Fault, ...]:
    """Each warning once; one that cells have for several values is told by its key."""
    by_text: dict[tuple[str, str], Fault] = {}
    for warning in warnings:
        known = by_text.setdefault((warning.key, warning.problem), warning)
        if known.given != warning.given:
            by_text[warning.key, warning.problem] = replace(warning, given="")
    return tuple(by_text.values())


def _of_sweeps(command: Command, checked: Checked) -> list[Fault]:
    """What is set of the `sweep` node, which one run does not read."""
    if AS_CELL in command.overrides:
        return []  # a file of conf/sweep sets it, and the sweep has read it
    problem = f"{NO_EFFECT} in a single run; -m makes a sweep, as of scheduler.batch_size=1,2"
    changed = changed_keys(checked.config) if checked.config is not None else ()
    return [
        Fault(key=key, given=f"{key}={show(value)}", problem=problem)
        for key, value in changed
        if key.startswith("sweep.")
    ]


def _unused_folders(command: Command, node: str) -> list[Fault]:
    """Settings of the folder that the command does not write into."""
    is_sweep = node == "hydra.run"
    problem = f"{NO_EFFECT} in a sweep, whose folder is hydra.sweep.dir"
    if not is_sweep:
        problem = f"{NO_EFFECT} in a single run, whose folder is hydra.run.dir; -m makes a sweep"
    return [
        Fault(key=key_of(text), given=text, problem=problem)
        for text in command.overrides
        if key_of(text).startswith(f"{node}.")
    ]


def check_composition(command: Command, space: ConfigSpace, *, resolves: bool = False) -> Verdict:
    """Check that the overrides compose, and resolve; for commands that show a configuration."""
    composition = compose_checked(space, command.overrides)
    faults = list(composition.faults)
    faults += secret_faults(composition.cfg)
    if resolves:
        faults += structure_faults(composition.cfg)
    return Verdict(message=render(faults) if faults else "")


def _preflight_sweep(command: Command, checker: Checker) -> Verdict:
    sweep = _check_sweep(command, checker)
    if sweep.faults:
        works, is_example = _corrected(command, sweep.faults, checker)
        message = render(sweep.faults, works=works, is_example=is_example)
        return Verdict(message=message, is_multirun=True)
    roles = {cell.number: _endless_role(sweep.checked[cell.number]) for cell in sweep.cells}
    served = [cell for cell in sweep.cells if roles[cell.number]]
    if served:
        return Verdict(
            message=_role_in_sweep(command, served[0], roles[served[0].number]), is_multirun=True
        )
    bad = sweep.by_cell
    warnings = _merged(w for found in sweep.checked.values() for w in found.warnings)
    warnings += tuple(_unused_folders(command, "hydra.run"))
    if not bad or (sweep.skips_invalid and len(bad) < len(sweep.cells)):
        return Verdict(
            warnings=warnings,
            cells=() if sweep.is_search else tuple(sweep.cells),
            probes=tuple(sweep.cells) if sweep.is_search else (),
            is_multirun=True,
            checked=tuple(sweep.checked[cell.number] for cell in sweep.cells),
            invalid={number: tuple(faults) for number, faults in bad.items()},
        )
    works = _corrected_sweep(command, sweep, checker)
    if len(sweep.cells) == 1:
        message = render(bad[0], works=works)
    else:
        title = f"inferkit: {len(bad)} of {len(sweep.cells)} edges of the search cannot run"
        title = f"{title}; nothing was started" if sweep.is_search else ""
        message = render_cells(sweep.cells, bad, works=works, title=title)
    return Verdict(message=message, is_multirun=True)


def _endless_role(checked: Checked) -> str:
    """The role of a cell that serves until it is stopped; empty where it ends by itself."""
    config = checked.config
    if config is None or not config.runner._target_.startswith(SERVING):
        return ""
    return config.role or ""


def _role_in_sweep(command: Command, cell: Cell, role: str) -> str:
    """What to tell where a cell would serve: it ends only when it is told to."""
    text = next((t for t in command.overrides if key_of(t) == "role"), f"+role={role}")
    fault = Fault(
        key="role",
        given=f"-m {text}",
        problem="a role serves until it is stopped, so a sweep would stay in its first cell; "
        "start it without -m",
    )
    flags = tuple(flag for flag in command.flags if flag not in MULTIRUN)
    return render([fault], works=replace(command, flags=flags, overrides=cell.overrides))


def _check(overrides: Sequence[str], checker: Checker) -> Checked:
    """Check one run, and that its ranks can be started where they are to be."""
    checked = checker.check_overrides(overrides)
    if checked.config is None or not checker.is_run or any(map(os.environ.get, LAUNCHED)):
        return checked
    fault = _too_many_ranks(checked.config)
    return checked if fault is None else replace(checked, faults=(fault,), config=None)


def _too_many_ranks(config: InferenceConfig) -> Fault | None:
    parallel = config.parallel
    if parallel.ranks_per_node <= MAX_RANKS_PER_NODE or config.role == ROUTER:
        return None
    world_size = parallel.world_size
    return Fault(
        key="parallel.world_size",
        given=f"parallel.world_size={world_size}",
        problem=f"puts {parallel.ranks_per_node} ranks on one node, where a command starts at most "
        f"{MAX_RANKS_PER_NODE}; it takes {-(-world_size // MAX_RANKS_PER_NODE)} nodes or more, "
        "listed in parallel.node_ips (`check` looks at any number without starting them)",
        fix=Fix(drop=("parallel", "parallel.world_size")),
    )


def _is_multirun(command: Command, space: ConfigSpace) -> bool:
    if any(flag in MULTIRUN for flag in command.flags):
        return True
    return str(OmegaConf.select(_hydra(command, space), "mode")).endswith("MULTIRUN")


def _hydra(command: Command, space: ConfigSpace) -> DictConfig:
    """Hydra's own part, without the axes of a sweep: only choices and its own keys decide it."""
    fixed = [
        text
        for text in _fixed(command, space)
        if space.parse(text).is_hydra_override() or space.is_group(space.parse(text).key_or_group)
    ]
    return compose_checked(space, fixed).hydra


def _common(command: Command, space: ConfigSpace) -> Composition:
    """The configuration without the axes of a sweep."""
    return compose_checked(space, _fixed(command, space))


def _fixed(command: Command, space: ConfigSpace) -> list[str]:
    """Overrides of one value."""
    return [
        text
        for text in command.overrides
        if syntax_fault(space, text) is None and not space.parse(text).is_sweep_override()
    ]


def _folder_faults(command: Command, space: ConfigSpace, key: str) -> list[Fault]:
    """A folder of the user's own choice for the run must be one that can be written."""
    text = next((text for text in command.overrides if key_of(text) == key), None)
    if text is None:
        return []
    try:
        folder = OmegaConf.select(_hydra(command, space), key.removeprefix("hydra."))
    except OmegaConfBaseException:
        return []  # it depends on what only a running Hydra knows
    problem = folder_problem(Path(str(folder)))
    return [Fault(key=key, given=text, problem=problem, fix=Fix(drop=(key,)))] if problem else []


def _check_sweep(command: Command, checker: Checker) -> _Sweep:
    space = checker.space
    common = _common(command, space)
    faults = [fault for fault in common.faults if fault.key.startswith(HYDRA)]
    # The grid keeps the last choice of a group alone, and its cells would not show the others.
    repeated = repeated_choices(space, command.overrides).values()
    faults += [fault for fault in repeated if not fault.key.startswith(HYDRA)]
    faults += _folder_faults(command, space, "hydra.sweep.dir")
    params = OmegaConf.select(common.hydra, "sweeper.params") or {}
    lay_out = probes if is_search(common.hydra) else expand
    cells, found = lay_out(space, command.overrides, {str(k): str(v) for k, v in params.items()})
    sweep = _Sweep(
        cells=[with_load(space, cell) for cell in cells],
        faults=[*faults, *found],
        is_search=is_search(common.hydra),
        skips_invalid=OmegaConf.select(common.cfg, "sweep.skip_invalid") is True,
    )
    if not sweep.faults:
        for cell in sweep.cells:
            sweep.checked[cell.number] = _check(cell.overrides, checker)
    config = next((found.config for found in sweep.checked.values() if found.config), None)
    if sweep.is_search and config is not None:
        sweep.faults += search_faults(common.hydra, objective_of(config))
    return sweep


def _corrected(
    command: Command, faults: Iterable[Fault], checker: Checker
) -> tuple[Command | None, bool]:
    """A command that passes, and whether it holds example values; (None, False) = none known."""
    examples: set[str] = set()
    for _ in range(MAX_CORRECTIONS):
        fixes = []
        for fault in faults:
            if fault.fix is None:
                return None, False
            fixes.append(fault.fix)
        examples |= {key_of(text) for fix in fixes if fix.is_example for text in fix.add}
        examples |= {f.key for f in faults if f.fix is not None and f.fix.environment}
        corrected = command.fixed(fixes)
        if corrected == command:
            return None, False
        command = corrected
        faults = [f for f in _all_faults(command, checker) if f.key not in examples]
        if not faults:
            return command, bool(examples)
    return None, False


def _corrected_sweep(command: Command, sweep: _Sweep, checker: Checker) -> Command | None:
    """The sweep without the axis values that no good cell has; faults of all cells cured."""
    for _ in range(MAX_CORRECTIONS):
        corrected = _without_shared(command, sweep)
        if corrected == command:
            break
        command = corrected
        sweep = _check_sweep(command, checker)
    bad = sweep.by_cell
    good = [cell for cell in sweep.cells if cell.number not in bad]
    cure = {fault.fix for faults in bad.values() for fault in faults}
    if len(cure) == 1 and (fix := cure.pop()) is not None and not _is_of_cells(fix, sweep):
        corrected = command.fixed([fix])
        if not _all_faults(corrected, checker):
            return corrected
    fixes = narrowed(checker.space, command.overrides, good, is_search=sweep.is_search)
    if not good or fixes is None:
        return _corrected_cell(command, sweep, checker)
    corrected = command.fixed(fixes)
    if bad and corrected == command:  # every value runs in some cell
        return command.fixed([Fix(add=("sweep.skip_invalid=true",))])
    return None if _all_faults(corrected, checker) else corrected


def _is_of_cells(fix: Fix, sweep: _Sweep) -> bool:
    """Whether a fix changes what differs from cell to cell."""
    varying = {key_of(o) for texts in varying_overrides(sweep.cells).values() for o in texts}
    return bool(varying & {*map(key_of, fix.add), *fix.drop})


def _without_shared(command: Command, sweep: _Sweep) -> Command:
    """The sweep after the fixes of faults that every cell has."""
    shared = shared_faults(sweep.cells, sweep.by_cell)
    command = command.fixed(fault.fix for fault in shared if fault.fix and fault.given)
    for fault in shared:
        if fault.given or fault.fix is None:
            continue
        known = key_of(fault.fix.add[0]) if fault.fix.add else fault.key
        if known == fault.key:
            command = command.fixed([Fix(drop=(fault.key,))])  # no value of the axis would do
        else:
            command = command.renamed(fault.key, known)
    return command


def _corrected_cell(command: Command, sweep: _Sweep, checker: Checker) -> Command | None:
    """The first cell alone, where every cell has a fault of its own."""
    cell = sweep.cells[0]
    hydra = [text for text in command.overrides if key_of(text).startswith("hydra.")]
    command = replace(command, overrides=(*hydra, *cell.overrides))
    works, is_example = _corrected(command, sweep.by_cell.get(cell.number, []), checker)
    return None if is_example else works


def _all_faults(command: Command, checker: Checker) -> list[Fault]:
    if not _is_multirun(command, checker.space):
        folder = _folder_faults(command, checker.space, "hydra.run.dir")
        return [*_check(command.overrides, checker).faults, *folder]
    sweep = _check_sweep(command, checker)
    return [*sweep.faults, *(fault for found in sweep.by_cell.values() for fault in found)]
