"""The cells of a sweep as they are run: the folder of each, and the words of its command.

A cell is a plain single run: `python -m inferkit WORDS` repeats it anywhere.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from inferkit.config.arguments import Arguments
from inferkit.config.faults import Cell, Fault, key_of
from inferkit.config.preflight import AS_CELL, MULTIRUN, Verdict
from inferkit.config.schema import InferenceConfig
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError

SWEEP_DIR = "hydra.sweep.dir"
SUBDIR = "hydra.sweep.subdir"
BY_NUMBER = ("${hydra:job.num}", "${hydra.job.num}")
OF_THE_SWEEP = ("sweep", "sweeper", "launcher", "run", "mode")
"""Hydra's settings that are no business of a cell."""
MAX_NAME_BYTES = 255
"""The longest name of a file or folder."""


@dataclass(frozen=True, kw_only=True)
class PlannedCell:
    """A cell with all that is needed to run it."""

    number: int
    overrides: tuple[str, ...]
    """As it is listed."""
    folder: Path
    words: tuple[str, ...] = ()
    """Of the command that runs it."""
    config: InferenceConfig | None = None
    """None = it has faults."""
    faults: tuple[Fault, ...] = ()


def compose_multirun(arguments: Arguments, sweep_dir: Path | None = None) -> DictConfig:
    """The configuration of the sweep itself, as Hydra composes and records it.

    Args:
        sweep_dir: where the command line names none.

    Raises:
        HydraException: it does not compose.
    """
    own = [] if sweep_dir is None else [f"{SWEEP_DIR}={quoted(str(sweep_dir))}"]
    mode = [f"hydra.mode={RunMode.MULTIRUN.name}"]
    return arguments.space().loader.load_configuration(
        config_name=arguments.config_name,
        overrides=[*arguments.overrides, *mode, *own],
        run_mode=RunMode.MULTIRUN,
    )


def sweep_dir_of(cfg: DictConfig) -> Path:
    """hydra.sweep.dir of a sweep's configuration.

    Raises:
        ConfigError: its value cannot be resolved.
    """
    with _known_to_resolvers(cfg):
        return Path(_resolved(cfg, SWEEP_DIR))


def plan_cells(
    arguments: Arguments, verdict: Verdict, cfg: DictConfig, sweep_dir: Path
) -> list[PlannedCell]:
    """Args:
        cfg: of the sweep itself.

    Raises:
        ConfigError: hydra.sweep.subdir does not give every cell a folder of its own.
    """
    space = arguments.space()
    folders = [sweep_dir / name for name in _folder_names(space, cfg, verdict.cells)]
    return [
        PlannedCell(
            number=cell.number,
            overrides=cell.overrides,
            folder=folder,
            words=cell_words(arguments, cell.overrides, folder),
            config=checked.config,
            faults=verdict.invalid.get(cell.number, ()),
        )
        for cell, folder, checked in zip(verdict.cells, folders, verdict.checked, strict=True)
    ]


def cell_words(arguments: Arguments, overrides: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Words of the command line of one cell."""
    left_out = (*MULTIRUN, "--run")
    hydra = [text for text in arguments.overrides if _is_for_cells(text)]
    return (
        *(flag for flag in arguments.flags if flag not in left_out),
        *(text for text in overrides if not key_of(text).startswith("sweep.")),
        *hydra,
        AS_CELL,
        f"hydra.run.dir={quoted(str(folder.absolute()))}",
    )


def quoted(text: str) -> str:
    """A value that Hydra takes as it is."""
    return "'" + text.replace("'", "\\'") + "'"


def _is_for_cells(override: str) -> bool:
    """One of Hydra's own settings that a cell has in common with a single run."""
    parts = key_of(override).replace("/", ".").split(".")
    return parts[0] == "hydra" and len(parts) > 1 and parts[1] not in OF_THE_SWEEP


def _folder_names(space: ConfigSpace, cfg: DictConfig, cells: Sequence[Cell]) -> list[str]:
    typed = OmegaConf.to_container(cfg.hydra.sweep, resolve=False)
    assert isinstance(typed, dict), "hydra.sweep is a node"
    if typed["subdir"] in BY_NUMBER:
        return [str(cell.number) for cell in cells]
    names = [_composed_name(space, cfg, cell) for cell in cells]
    _check_names(str(typed["subdir"]), names, cells)
    return names


def _composed_name(space: ConfigSpace, cfg: DictConfig, cell: Cell) -> str:
    """What hydra.sweep.subdir is in a cell."""
    composed = space.loader.load_sweep_config(cfg, list(cell.overrides))
    with open_dict(composed):
        composed.hydra.job.num = composed.hydra.job.id = cell.number
    with _known_to_resolvers(composed):
        return _resolved(composed, SUBDIR)


def _check_names(subdir: str, names: Sequence[str], cells: Sequence[Cell]) -> None:
    """Raises:
    ConfigError: two cells would write into one folder, or one somewhere else.
    """
    numbers: dict[PurePath, int] = {}
    advice = f"leave {SUBDIR} out, which gives each cell its number"
    shorter = ", or have fewer keys in it: hydra.job.config.override_dirname.exclude_keys=[KEY]"
    for name, cell in zip(names, cells, strict=True):
        path = PurePath(name)
        shown = f"{SUBDIR}={subdir} gives cell #{cell.number} the folder {name}"
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ConfigError(f"{shown}, which is not below that of the sweep; {advice}")
        if any(len(part.encode()) > MAX_NAME_BYTES for part in path.parts):
            raise ConfigError(f"{shown}, a name that no file system takes; {advice}{shorter}")
        for other, number in numbers.items():
            if path == other or other in path.parents or path in other.parents:
                raise ConfigError(f"{shown}, where cell #{number} has {other}; {advice}")
        numbers[path] = cell.number


@contextmanager
def _known_to_resolvers(cfg: DictConfig) -> Iterator[None]:
    """Meanwhile `${hydra:...}` is of this configuration."""
    instance = HydraConfig.instance()
    before = instance.cfg
    instance.set_config(cfg)
    try:
        yield
    finally:
        instance.cfg = before


def _resolved(cfg: DictConfig, key: str) -> str:
    try:
        return str(OmegaConf.select(cfg, key, throw_on_missing=True))
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        raise ConfigError(f"{key} cannot be resolved: {text}; give a plain value") from error
