"""Where files that are fetched or converted once are kept. Torch-free; creates nothing."""

import os
from pathlib import Path
from typing import Final

EMBEDDED_PREFIX: Final = "pypi:"


def cache_dir() -> Path:
    """`$INFERKIT_CACHE`, else `inferkit` in `$XDG_CACHE_HOME` or `~/.cache`."""
    own = os.environ.get("INFERKIT_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "inferkit"


def embedded_dir(path: str) -> Path:
    """Where the embedded model `pypi:NAME==VERSION` lies once it was fetched."""
    return cache_dir() / path.removeprefix(EMBEDDED_PREFIX).replace("==", "-")
