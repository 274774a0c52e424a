"""A revision of this checkout in a folder of its own, for as long as it is needed."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from inferkit.config.faults import closest, did_you_mean
from inferkit.core.errors import ConfigError

GIT_TIMEOUT_S = 120
OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
"""Variables that git sets for its hooks; they would lead to another repository."""
ENDING = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """The git checkout that the running code lies in."""

    folder: Path
    """Its top."""
    prefix: Path
    """Where in it `inferkit/` lies; mostly `.`."""

    def commit_of(self, revision: str) -> str:
        """The full id of a revision's commit.

        Raises:
            ConfigError: there is none.
        """
        named = f"{revision}^{{commit}}"
        found = _git(self.folder, "rev-parse", "--verify", "--quiet", "--end-of-options", named)
        if found.returncode == 0:
            return found.stdout.strip()
        names = _git(self.folder, "for-each-ref", "--format=%(refname:short)").stdout.split()
        guess = did_you_mean(closest(revision, names))
        raise ConfigError(
            f"{revision}: there is no such revision in the checkout of this inferkit, "
            f"{self.folder}{guess}; a branch, a tag, HEAD~3 or a commit is one"
        )

    @contextlib.contextmanager
    def worktree(self, commit: str) -> Iterator[Path]:
        """The folder that holds `inferkit/` as of `commit`.

        It is gone at the end, also after Ctrl-C, SIGTERM and SIGHUP.

        Raises:
            ConfigError: git cannot make it.
        """
        folder = Path(tempfile.mkdtemp(prefix="inferkit-diff-"))
        path = folder / "tree"
        try:
            with _ended_by_exceptions():
                # No hook of the user's may run for it.
                options = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")
                made = _git(self.folder, *options, "worktree", "add", "--detach", str(path), commit)
                if made.returncode != 0:
                    raise ConfigError(f"git cannot check {commit} out: {_reason(made)}")
                yield path / self.prefix
        finally:
            with _signals_ignored():
                # Twice --force: an interrupted `add` has left it locked.
                removed = _git(self.folder, "worktree", "remove", "--force", "--force", str(path))
                shutil.rmtree(folder, ignore_errors=True)
                if removed.returncode != 0:
                    _git(self.folder, "worktree", "prune")


def find_checkout() -> Checkout:
    """The checkout of the code that runs.

    Raises:
        ConfigError: it runs from none, or there is no git.
    """
    root = Path(__file__).resolve().parents[3]
    top = _git(root, "rev-parse", "--show-toplevel", "--show-prefix")
    is_tracked = _git(root, "ls-files", "--error-unmatch", "inferkit/__main__.py").returncode == 0
    if top.returncode != 0 or not is_tracked:
        why = f" ({_reason(top)})" if top.returncode != 0 else ""
        raise ConfigError(
            f"revisions are compared in a git checkout, and this inferkit runs from {root}, which "
            f"is none{why}; start python -m inferkit in a clone"
        )
    folder, _, prefix = top.stdout.partition("\n")
    return Checkout(folder=Path(folder), prefix=Path(prefix.strip()))


def _reason(result: "subprocess.CompletedProcess[str]") -> str:
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {result.returncode}"


def _git(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run git; a Ctrl-C reaches this process alone, which then ends it.

    Raises:
        ConfigError: there is no git, or it hangs.
    """
    variables = {name: value for name, value in os.environ.items() if name not in OF_A_HOOK}
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
            env=variables,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise ConfigError("revisions are compared with git, which is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"git {arguments[0]} did not end within {GIT_TIMEOUT_S} s") from error


@contextlib.contextmanager
def _ended_by_exceptions() -> Iterator[None]:
    """Signals that end a process do so by SystemExit here, so that `finally` is reached."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    with _handling(leave, ENDING):
        yield


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """A second Ctrl-C does not stop the clearing up."""
    with _handling(signal.SIG_IGN, (signal.SIGINT, *ENDING)):
        yield


@contextlib.contextmanager
def _handling(handler: object, numbers: tuple[signal.Signals, ...]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # others cannot have handlers
        return
    before = {number: signal.signal(number, handler) for number in numbers}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
