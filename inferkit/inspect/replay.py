"""The verb `replay`: runs a recorded configuration again and compares the tokens."""

import argparse
import json
import os
import sys
from datetime import datetime
from pathlib import Path

from inferkit.config.arguments import Arguments, UsageError
from inferkit.config.check import Checker
from inferkit.config.faults import render
from inferkit.config.load_rules import LOAD_RUNNER
from inferkit.config.provenance import record
from inferkit.config.recorded import read_origins
from inferkit.config.run_folder import RUNS, make_run_folder
from inferkit.config.schema import InferenceConfig
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError
from inferkit.core.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_REFUSED
from inferkit.inspect.changes import Change, find_changes, found_by_ranks, role_changes
from inferkit.inspect.run_directory import RecordedRun, read_object, read_run
from inferkit.inspect.same_tokens import OUTPUT_FILES, Agreement, compare_tokens, read_tokens
from inferkit.runtime.instances import find_node_rank
from inferkit.runtime.launched import find_launched
from inferkit.runtime.logs import log_run
from inferkit.sweep.cells import OK, RESULT_FILE, JobResult
from inferkit.sweep.job import Job

USAGE = """\
Run what a run directory has recorded again, and compare the tokens.

Usage: inferkit replay DIR [--output DIR]

  inferkit replay outputs/2026-01-31/12-00-00-1
  inferkit replay outputs/sweeps/2026-01-31/12-00-00-1/3      one cell of a sweep

First it shows what differs from then: code, versions of packages, files of the model and of the
data set, environment, host. Then DIR/config.resolved.yaml runs, as it is: no option of conf/ and
no default of today changes it. It runs where the recorded run was started, so that relative paths
lead to the same files; several ranks are started as they were, also those that torchrun started.

  --output DIR    where the new run goes; default: a new folder under outputs/

A run with a role is started again and serves until Ctrl-C; there is nothing to compare then. A
benchmark (runner=load) compares the tokens of its requests. What these start, the roles of a
cluster or a service, they compose anew from the recorded command; where that comes out otherwise,
it is told. A run of several nodes is replayed by the same command on each of them; the first one
compares.

Exit code: 0 same tokens, 1 other tokens, 2 the run cannot be replayed or compared."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path)


def run(arguments: Arguments) -> int:
    """Carry `replay DIR` out; returns the exit code."""
    recorded = read_run(_folder(arguments))
    output, runs = _checked_output(arguments.options.output, recorded), RUNS.absolute()
    _go_to(recorded.cwd)
    config = _config(recorded)
    node_rank = find_node_rank(config)
    if node_rank == 0:
        _check_outputs(recorded, config)
    _check_model(recorded, config)
    try:
        changes = find_changes(recorded, config)
    except OSError as error:
        raise ConfigError(f"{recorded.folder} cannot be replayed: {error}") from None
    print(_report(recorded, changes))
    output = _make(output, runs) / (f"node{node_rank}" if node_rank else "")
    serves = config.role is not None and read_tokens(recorded.folder) is None
    again = f"starting +role={config.role} again, there is nothing to compare: it runs"
    print(f"{again if serves else 'replaying'} in {output}", flush=True)
    result = _run(recorded, config, output, changes)
    for change in (*found_by_ranks(recorded, output), *role_changes(recorded.folder, output)):
        print(f"differs from then: {change.name}: {change.text}")
    if serves:
        return EXIT_OK if result.status == OK else EXIT_FAILED
    return _verdict(recorded, output, result, node_rank)


def _folder(arguments: Arguments) -> Path:
    if len(arguments.overrides) != 1 or "=" in arguments.overrides[0]:
        given = " ".join(arguments.overrides) or "nothing"
        raise UsageError(f"replay takes the folder of one run, and was given {given}")
    launched = find_launched()
    if launched is not None:
        raise UsageError(
            f"replay starts all ranks itself: start it once, without {launched.launcher}"
        )
    return Path(arguments.overrides[0])


def _checked_output(given: Path | None, recorded: RecordedRun) -> Path | None:
    """The absolute folder that the user names; a run that is there is never written over."""
    if given is None:
        return None
    output = given.absolute()
    if output == recorded.folder or output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise UsageError(f"--output {given} is there already; name a new or an empty folder")
    return output


def _go_to(folder: Path | None) -> None:
    """To where the run was started: its relative paths and the user's own modules are there."""
    if folder is None or folder == Path.cwd():
        return
    os.chdir(folder)
    sys.path.append(str(folder))


def _config(recorded: RecordedRun) -> InferenceConfig:
    """The recorded configuration, checked for this machine.

    Raises:
        ConfigError: this version does not understand it, or it cannot run here.
    """
    stored = recorded.stored
    problems = [f"there is no key {key}" for key in stored.unknown] + list(stored.misfits)
    if problems:
        title = f"{recorded.folder} cannot be replayed by this version of inferkit:"
        raise ConfigError("\n".join([title, *(f"  {one}" for one in problems), _advice(recorded)]))
    checked = Checker(ConfigSpace()).check_composed(stored.cfg)
    if checked.config is None:
        count = len(checked.faults)
        faults = f"{count} fault{'s' if count > 1 else ''}"
        title = f"{recorded.folder} cannot be replayed here, {faults}"
        raise ConfigError(render(checked.faults, title=title))
    for warning in checked.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return checked.config


def _advice(recorded: RecordedRun) -> str:
    commit = recorded.git.get("commit")
    if commit is None:
        version = recorded.provenance.get("versions", {}).get("inferkit") or "not recorded"
        return f"replay it with the version that it ran with: {version}"
    return (
        "replay it with the code that it ran with: "
        f"git worktree add ../inferkit-then {commit[:10]} && cd ../inferkit-then && "
        f"python -m inferkit replay {recorded.folder}"
    )


def _check_outputs(recorded: RecordedRun, config: InferenceConfig) -> None:
    """Refuse a run that has left nothing to compare with, before hours are spent on it.

    Raises:
        ConfigError: it should have left output tokens, and there are none.
    """
    if config.role is not None and config.runner._target_ != LOAD_RUNNER:
        return
    tokens = read_tokens(recorded.folder)
    if tokens or (tokens is not None and _is_whole(recorded.folder)):
        return
    names = " nor ".join(OUTPUT_FILES)
    what = f"neither {names}" if tokens is None else "no request that was finished"
    status = read_object(recorded.folder / RESULT_FILE).get("status")
    ended = f" (it ended as {status})" if status else ""
    command = recorded.provenance.get("command")
    again = f"\nits command was: {command}" if command else ""
    raise ConfigError(
        f"{recorded.folder} cannot be replayed: it has left {what}{ended}, so there is nothing to "
        f"compare{again}"
    )


def _check_model(recorded: RecordedRun, config: InferenceConfig) -> None:
    """Refuse a run whose model was a folder or file that is no more there: its name would be
    taken for that of a model on a hub.

    Raises:
        ConfigError: names the path, and where it was looked for.
    """
    files, path = recorded.provenance.get("identity", {}).get("model", {}), config.model.path
    if not path or not files or not {"hub", "embedded"}.isdisjoint(files):
        return
    place = Path(path).expanduser().absolute()
    if not place.exists():
        raise ConfigError(
            f"{recorded.folder} cannot be replayed: model.path={path} is no more there\n"
            f"looked for {place}; put the model back to this place"
        )


def _report(recorded: RecordedRun, changes: list[Change]) -> str:
    title = f"replay of {recorded.folder}"
    if not recorded.provenance:
        return f"{title}\n  it has no provenance.json: what differs from then is not known"
    if not changes:
        as_then = "code, versions, model, data set, environment and host are as recorded"
        return f"{title}\n  {as_then}"
    names = [f"{change.kind} {change.name}".rstrip() for change in changes]
    width = max(map(len, names))
    texts = (change.text for change in changes)
    lines = [f"    {name:<{width}}  {text}" for name, text in zip(names, texts, strict=True)]
    return "\n".join([title, "  differs from then:", *lines])


def _make(output: Path | None, runs: Path) -> Path:
    """The folder that the user names, or a new one below `runs`."""
    try:
        if output is None:
            return make_run_folder(runs, datetime.now())
        output.mkdir(parents=True, exist_ok=True)
        return output
    except OSError as error:
        raise ConfigError(f"cannot make a run folder: {error}; name one by --output") from None


def _run(
    recorded: RecordedRun, config: InferenceConfig, output: Path, changes: list[Change]
) -> JobResult:
    facts = {
        "choices": recorded.provenance.get("choices", {}),
        "replay": {
            "of": str(recorded.folder),
            "changes": [f"{c.kind} {c.name}".rstrip() + f": {c.text}" for c in changes],
        },
    }
    output.mkdir(parents=True, exist_ok=True)
    log_run(output / "inferkit.log", level=os.environ.get("INFERKIT_LOG_LEVEL") or "INFO")
    job = Job(
        run_dir=output,
        command=str(recorded.provenance.get("command", "")),
        overrides=tuple(recorded.provenance.get("overrides", ())),
        facts=facts,
        origins=read_origins(recorded.folder),
    )
    return job.run(lambda: config)


def _verdict(recorded: RecordedRun, output: Path, result: JobResult, node_rank: int) -> int:
    """Print whether the tokens are the same, and record it."""
    if result.status != OK:
        print(f"no verdict: the replay did not come to its end, see {output}")
        return EXIT_REFUSED
    if node_rank:
        print("the first node compares the tokens")
        return EXIT_OK
    old, new = read_tokens(recorded.folder), read_tokens(output)
    if old is None or new is None:
        where = recorded.folder if old is None else output
        print(f"no verdict: {where} has neither {' nor '.join(OUTPUT_FILES)}")
        return EXIT_REFUSED
    agreement = compare_tokens(old, new, is_whole=_is_whole(recorded.folder))
    print(agreement)
    _record(output, agreement)
    return EXIT_OK if agreement.is_same else EXIT_FAILED


def _is_whole(folder: Path) -> bool:
    path = folder / RESULT_FILE
    return path.is_file() and json.loads(path.read_text("utf-8"))["status"] == OK


def _record(output: Path, agreement: Agreement) -> None:
    verdict = {"same_tokens": agreement.is_same, "differences": list(agreement.differences)}
    record(output, replay=verdict)
