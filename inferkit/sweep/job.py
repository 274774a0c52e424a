"""One run of a configuration in a folder of its own: a single run, a cell, a replay, or a rank.

Knows no Hydra: whoever has a configuration can run it.
"""

import logging
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inferkit.config.build import build
from inferkit.config.faults import key_of, shell_quote
from inferkit.config.identity import CODE_FILE, RunKeys, code_files
from inferkit.config.origins import Origins
from inferkit.config.provenance import write_json, write_run
from inferkit.config.recorded import write_origins
from inferkit.config.schema import InferenceConfig
from inferkit.config.secrets import hide_secrets_of
from inferkit.core.error_place import told_with_place
from inferkit.core.errors import AddressError, ComponentError, InferkitError, RequestError
from inferkit.core.place import RankPlace
from inferkit.core.sampling_params import MAX_SEED
from inferkit.core.secrets import hide
from inferkit.runtime.logs import hide_in_logs, quiet_libraries
from inferkit.runtime.rank_errors import PeerLostError, where_traceback
from inferkit.sweep.cells import OK, RESULT_FILE, JobResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that ends in a result whatever happens; only a signal goes on to the caller."""

    run_dir: Path
    command: str
    """What the user typed; recorded."""
    overrides: tuple[str, ...]
    number: int = 0
    """Of the cell in its sweep; 0 for a single run."""
    place: RankPlace | None = None
    """Of this process, where it is a rank itself."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More for provenance.json."""
    origins: Origins = field(default_factory=dict)
    """Where the configuration's values come from; recorded."""

    @property
    def _is_other_rank(self) -> bool:
        """Rank 0 writes and speaks for this process."""
        return self.place is not None and self.place.rank != 0

    def run(self, config: Callable[[], InferenceConfig]) -> JobResult:
        """Run what `config` returns and write result.json. Failures are told and stored.

        Raises:
            KeyboardInterrupt, SystemExit: a signal came; the result says so.
        """
        quiet_libraries()
        hide_in_logs()
        result = JobResult(number=self.number, overrides=self.overrides)
        start_s = time.monotonic()
        try:
            result = replace(result, status=OK, metrics=self._run(config()) or {})
        except Exception as error:
            result = result.failed(error)
            self._tell(error)
        except (KeyboardInterrupt, SystemExit) as error:
            result = result.interrupted(error)
            raise
        finally:
            result = replace(result, seconds=time.monotonic() - start_s)
            if not self._is_other_rank:
                result.write(self.run_dir)
        return result

    def _run(self, config: InferenceConfig) -> dict[str, Any] | None:
        hide_secrets_of(config)
        if not self._is_other_rank:
            config = with_run_seed(config)
            identity = RunKeys().facts(config)
            write_run(
                self.run_dir,
                config,
                command=self.command,
                overrides=self.overrides,
                cwd=os.getcwd(),
                identity=identity,
                **self.facts,
            )
            write_json(self.run_dir / CODE_FILE, code_files())
            write_origins(self.run_dir, config, self.origins)
        runner = build(config.runner, allowed_targets=config.allowed_targets, key="runner")
        metrics: dict[str, Any] | None
        if self.place is None:
            metrics = runner.run(config, run_dir=self.run_dir)
        else:
            metrics = runner.run_rank(config, run_dir=self.run_dir, place=self.place)
        return metrics

    def _tell(self, error: Exception) -> None:
        """The terminal shows what the user can act upon; logs show all of it."""
        text = str(error) if isinstance(error, InferkitError) else told_with_place(error)
        if isinstance(error, AddressError) and error.fix:
            text += f"\nthis works:\n  {with_override(self.command, error.fix)}"
        elif isinstance(error, ComponentError) or not isinstance(error, InferkitError):
            log = log_file() or self.run_dir / RESULT_FILE
            text += f"\n  {where_traceback(log)}"
        if not (isinstance(error, PeerLostError) and self._is_other_rank):
            print(f"inferkit: {hide(text)}", file=sys.stderr)
        _log_to_files("job failed", error)


def with_run_seed(config: InferenceConfig) -> InferenceConfig:
    """`config` with the seed that its requests' own come from, where an offline run needs one."""
    data = config.data
    is_drawn = data.temperature > 0 and data.seed is None and data.run_seed is None
    if config.role is not None or not is_drawn:
        return config
    return replace(config, data=replace(data, run_seed=secrets.randbelow(MAX_SEED)))


def with_override(command: str, override: str) -> str:
    """A command line with an override in place of the one of its key."""
    words = [word for word in shlex.split(command) if key_of(word) != key_of(override)]
    return " ".join(map(shell_quote, [*words, override]))


def log_file() -> Path | None:
    """Where this process logs to; None = to no file."""
    handlers = logging.getLogger().handlers
    files = [handler for handler in handlers if isinstance(handler, logging.FileHandler)]
    return Path(files[-1].baseFilename) if files else None


def _log_to_files(message: str, error: Exception) -> None:
    if isinstance(error, AddressError | RequestError):
        message, details = f"{message}: {error}", None
    else:
        details = (type(error), error, error.__traceback__)
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), details)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
