"""Logging: of rank processes, which inherit no handlers, and of libraries."""

import logging
from pathlib import Path


def log_to_file(path: Path, *, rank: int, level: str) -> None:
    """Send this process's log to a file of the run directory, each line with its rank."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(
        logging.Formatter(f"[rank{rank}] %(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    quiet_libraries()


def log_run(path: Path, *, level: str) -> None:
    """Log a run that Hydra does not drive as Hydra would: to the terminal and to a file."""
    logging.basicConfig(
        format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s",
        level=level.upper(),
        handlers=[logging.StreamHandler(), logging.FileHandler(path, encoding="utf-8")],
        force=True,
    )


def quiet_libraries() -> None:
    """What libraries say of every request or file is not for this program's log."""
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
