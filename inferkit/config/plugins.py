"""Plugins of Hydra that a sweep may use, and what to install for them."""

import re
from collections.abc import Mapping

EXTRAS: Mapping[str, str] = {
    "hydra/sweeper=optuna": "optuna",
    "hydra/launcher=submitit_slurm": "slurm",
    "hydra/launcher=submitit_local": "slurm",
}
"""Choice of an option of Hydra's own -> the extra of inferkit that brings it."""
IS_MISSING = "is a plugin of Hydra that is not installed"
NOT_FOUND = re.compile(r"Could not find '(hydra/[\w/]+)/(\w+)'")
"""How Hydra says that a file names an option which does not exist."""


def missing_plugin(choice: str) -> str:
    """What is wrong with `hydra/sweeper=optuna` where it does not exist; empty = nobody knows."""
    extra = EXTRAS.get(choice)
    if extra is None:
        return ""
    return f"{IS_MISSING}: pip install 'inferkit[{extra}]'"


def missing_in_file(message: str) -> str:
    """The same of Hydra's own message on a file that chooses it."""
    found = NOT_FOUND.search(message)
    choice = f"{found[1]}={found[2]}" if found else ""
    problem = missing_plugin(choice)
    return f"chooses {choice}, which {problem}" if problem else ""
