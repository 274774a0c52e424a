"""The command line: verbs, or pre-flight and then one run or a sweep under Hydra.

The parent process stays free of torch; what runs is the runner's own.
"""

import copy
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict, read_write

from inferkit.config.arguments import (
    Arguments,
    UsageError,
    check_verb_flags,
    own_flags,
    parse_arguments,
    program_name,
)
from inferkit.config.check import Checked
from inferkit.config.completion import asked_shell, complete
from inferkit.config.compose import to_inference_config
from inferkit.config.faults import Fault, closest, did_you_mean, key_of, render
from inferkit.config.help import help_text
from inferkit.config.preflight import Verdict, check_composition, preflight
from inferkit.config.recorded import origins_of_job, task_overrides
from inferkit.config.run_folder import RUNS, make_run_folder
from inferkit.config.secrets import masking_overrides
from inferkit.config.space import ConfigSpace
from inferkit.config.stray_words import stray_first_word
from inferkit.core.errors import ConfigError, InferkitError
from inferkit.core.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_REFUSED
from inferkit.core.place import RankPlace
from inferkit.inspect.verbs import VERBS
from inferkit.runtime.instances import find_instance
from inferkit.runtime.launched import (
    REFUSAL_GRACE_S,
    Launched,
    check_launched,
    find_launched,
)
from inferkit.runtime.logs import hidden_output, log_to_file
from inferkit.runtime.meeting import meeting
from inferkit.runtime.place import common_facts, find_node
from inferkit.sweep.cells import OK
from inferkit.sweep.hydra_main import call_hydra, hydra_words
from inferkit.sweep.job import Job
from inferkit.sweep.start import start_sweep

logger = logging.getLogger(__name__)

LOG_LEVEL = "INFERKIT_LOG_LEVEL"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
RUN_DIR = "hydra.run.dir"


def main() -> None:
    """Entry point of `inferkit` and `python -m inferkit`."""
    # A console script does not look for a user's own modules where it is started.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a character shows "?"; a finished run must not fail over it.
            stream.reconfigure(errors="replace")
    try:
        with hidden_output():
            code = run(sys.argv[1:])
    except KeyboardInterrupt:
        _tell("inferkit: interrupted")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (`| head`) is gone: nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILED
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Carry out one command line; returns the exit code."""
    verb = _verb(argv)
    if verb is not None and verb not in VERBS:
        _tell(f"inferkit: {stray_first_word(verb, VERBS, ConfigSpace(), program_name())}")
        return EXIT_REFUSED
    rest = list(argv[1:] if verb else argv)
    if "--help" in rest or "-h" in rest:
        texts = {name: verb.text for name, verb in VERBS.items()}
        print(VERBS[verb].usage if verb else help_text(program_name(), ConfigSpace(), texts))
        return EXIT_OK
    if "--version" in rest:
        print(f"inferkit {_version('inferkit')} (hydra {_version('hydra-core')})")
        return EXIT_OK
    try:
        arguments = parse_arguments(rest, VERBS[verb].add_options if verb else None)
        _log_level()
        if verb is not None:
            check_verb_flags(verb, arguments)
            return VERBS[verb].run(arguments)
    except (UsageError, HydraException, ConfigError) as error:
        _tell(f"inferkit: {error}")
        return EXIT_REFUSED
    try:
        if arguments.shows:
            return _show(arguments, rest)
        verdict = preflight(arguments.command(program_name()), arguments.space())
        config = verdict.checked[0].config if verdict.checked else None
        launched = find_launched(srun_port=config.parallel.master_port if config else 0)
    except (HydraException, ConfigError) as error:
        # The primary configuration itself does not compose (--config-path, --config-name).
        _tell(f"inferkit: {error}")
        return EXIT_REFUSED
    if launched is not None:
        return _run_as_rank(arguments, verdict, launched)
    if not verdict.is_good:
        _tell(verdict.message)
        return EXIT_REFUSED
    try:
        return start_sweep(arguments, verdict) if verdict.is_multirun else _run(arguments, verdict)
    except (HydraException, ConfigError) as error:
        _tell(f"inferkit: {error}")
        return EXIT_REFUSED


def _verb(argv: Sequence[str]) -> str | None:
    """The first word, if it is neither a flag nor an override."""
    if argv and "=" not in argv[0] and not argv[0].startswith(("-", "~", "+")) and argv[0]:
        return argv[0]
    return None


def _show(arguments: Arguments, argv: Sequence[str]) -> int:
    """Let Hydra show a configuration or its own facts; a shell is told what may be typed."""
    masks: list[str] = []
    if arguments.shows == "cfg":
        asked, space = arguments.command(program_name()), arguments.space()
        is_resolved = "--resolve" in arguments.flags
        verdict = check_composition(asked, space, resolves=is_resolved)
        if not verdict.is_good:
            _tell(verdict.message)
            return EXIT_REFUSED
        masks = masking_overrides(space.compose_job(arguments.overrides)) if is_resolved else []
    if arguments.shows == "shell_completion":
        command, _ = asked_shell(arguments.overrides)
        if command == "query":
            from inferkit.inspect.names import derived_names

            line = os.environ.get("COMP_LINE", "")
            offered = complete(
                line,
                arguments.space(),
                list(VERBS),
                lambda verb: own_flags(VERBS[verb].add_options),
                derived_names,
            )
            print("\n".join(offered))
            return EXIT_OK
    is_completion = arguments.shows == "shell_completion"
    words = argv if is_completion else hydra_words(arguments, *masks)
    # Hydra shows through logging, which turns a closed pipe (`| head`) into tracebacks.
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        call_hydra(lambda cfg: None, arguments, words)
    finally:
        signal.signal(signal.SIGPIPE, before)
    return EXIT_OK


def _run(arguments: Arguments, verdict: Verdict) -> int:
    """Run one job, in a folder that is its alone.

    Raises:
        ConfigError: there can be no such folder, this machine is no node of the run, or a port is
            in use.
    """
    node_rank = _node_rank(verdict.checked[0])
    _check_ports(arguments, verdict.checked[0])
    for warning in verdict.warnings:
        if warning not in verdict.checked[0].warnings:  # those are logged where the run begins
            _tell(f"warning: {warning}")
    extra = []
    if not _has_run_dir(arguments):
        try:
            extra.append(f"{RUN_DIR}={make_run_folder(RUNS, datetime.now())}")
        except OSError as error:
            raise ConfigError(
                f"cannot make a run folder: {error}; set {RUN_DIR}=/a/writable/folder"
            ) from error
    job = HydraJob(
        command=str(arguments.command(program_name())),
        node_rank=node_rank,
        warnings=verdict.warnings,
    )
    call_hydra(job.run, arguments, hydra_words(arguments, *extra))
    return EXIT_OK if job.is_ok else EXIT_FAILED


def _check_ports(arguments: Arguments, checked: Checked) -> None:
    """Raises:
    ConfigError: the run could not listen where it is to; holds a command that could.
    """
    config = checked.config
    assert config is not None, "a good verdict has a configuration"
    if config.role is None and not config.parallel.master_port:
        return
    from inferkit.online.ports import port_faults  # a run that listens nowhere does without

    faults = port_faults(config)
    if faults:
        fixes = [fault.fix for fault in faults if fault.fix is not None]
        works = (
            arguments.command(program_name()).fixed(fixes) if len(fixes) == len(faults) else None
        )
        title = "this machine cannot listen as configured; nothing was started"
        raise ConfigError(render(faults, works=works, title=title))


def _has_run_dir(arguments: Arguments) -> bool:
    return any(key_of(text) == RUN_DIR for text in arguments.overrides)


def _node_rank(checked: Checked) -> int:
    """Of this machine among the nodes of a run.

    Raises:
        ConfigError: it is none of them.
    """
    config = checked.config
    assert config is not None, "a good verdict has a configuration"
    if config.role is not None:
        return find_instance(config).node.node_rank
    return find_node(config.parallel).node_rank


def _run_as_rank(arguments: Arguments, verdict: Verdict, launched: Launched) -> int:
    """Be one rank of a run that torchrun or srun has started; rank 0 speaks for all."""
    refusal = verdict.message or _unfit_to_join(arguments, verdict, launched)
    if refusal:
        if launched.rank == 0:
            _tell(refusal)
        else:
            time.sleep(REFUSAL_GRACE_S)
        return EXIT_REFUSED
    cfg = copy.deepcopy(arguments.space().compose(arguments.overrides))
    HydraConfig.instance().set_config(cfg)
    is_given = _has_run_dir(arguments)

    def make_run_dir() -> Path:
        return Path(cfg.hydra.run.dir) if is_given else make_run_folder(RUNS, datetime.now())

    job = HydraJob(command=str(arguments.command(program_name())), warnings=verdict.warnings)
    config = verdict.checked[0].config
    assert config is not None, "a good verdict has a configuration"
    try:
        with meeting(
            launched.place(),
            on_stuck=lambda error: _tell(f"inferkit: {error}"),
            make_run_dir=make_run_dir,
            facts=common_facts(config),
            is_served=launched.is_served,
            attempt=launched.attempt,
        ) as met:
            run_dir, job.place, rank = met.run_dir, met.place, launched.rank
            assert run_dir is not None, "rank 0 makes one"
            run_dir.mkdir(parents=True, exist_ok=True)
            log_to_file(run_dir / f"rank{rank}.log", rank=rank, level=_log_level())
            with read_write(cfg.hydra), open_dict(cfg):
                cfg.hydra.runtime.output_dir = str(run_dir)
                HydraConfig.instance().set_config(cfg)
                del cfg["hydra"]
            job.run(cfg)
            met.has_finished = job.is_ok
    except (InferkitError, OSError) as error:
        _tell(f"inferkit: {error}")
        return EXIT_FAILED
    return EXIT_OK if met.has_finished else EXIT_FAILED


def _unfit_to_join(arguments: Arguments, verdict: Verdict, launched: Launched) -> str:
    """Why this command cannot run as ranks of `launched`; empty where it can."""
    command = arguments.command(program_name())
    by_itself = f"{launched.launcher} is not needed: start it once, as\n  {command}"
    if verdict.is_multirun:
        return f"inferkit: a sweep starts the ranks of every cell itself; {by_itself}"
    config = verdict.checked[0].config
    assert config is not None, "a good verdict has a configuration"
    if config.role is not None:
        return f"inferkit: +role={config.role} starts its ranks itself; {by_itself}"
    try:
        check_launched(launched, config.parallel.world_size)
    except ConfigError as error:
        return f"inferkit: {error}"
    return ""


@dataclass(kw_only=True)
class HydraJob:
    """A single run under Hydra; keeps how it ended."""

    command: str
    """What the user typed; recorded."""
    warnings: tuple[Fault, ...]
    """Of the pre-flight; logged when the run begins."""
    place: RankPlace | None = None
    """Of this process, where it is a rank itself."""
    node_rank: int = 0
    """Other nodes than the first keep their files apart: the folder may be shared."""
    is_ok: bool = False

    def run(self, cfg: DictConfig) -> dict[str, Any]:
        """Hydra's task function. Failures are told and stored, not raised."""
        hydra_cfg = HydraConfig.get()
        run_dir = Path(hydra_cfg.runtime.output_dir)
        if self.node_rank:
            run_dir = run_dir / f"node{self.node_rank}"
        if hydra_cfg.verbose is False:
            logging.getLogger().setLevel(_log_level())
        job = Job(
            run_dir=run_dir,
            command=self.command,
            overrides=task_overrides(hydra_cfg),
            place=self.place,
            facts={"choices": dict(hydra_cfg.runtime.choices)},
            origins=origins_of_job(hydra_cfg),
        )
        result = job.run(lambda: to_inference_config(cfg, warnings=self.warnings))
        self.is_ok = result.status == OK
        return result.metrics


def _log_level() -> str:
    """The level that INFERKIT_LOG_LEVEL asks for.

    Raises:
        UsageError: it is no level.
    """
    asked = os.environ.get(LOG_LEVEL) or "INFO"
    if asked.upper() not in LOG_LEVELS:
        guess = did_you_mean(closest(asked, LOG_LEVELS))
        known = ", ".join(LOG_LEVELS)
        raise UsageError(f"{LOG_LEVEL}={asked} is no log level{guess}\nlevels are {known}")
    return asked.upper()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(from a checkout)"


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
