"""Hydra's own main function, called with words instead of this process's command line."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from omegaconf import DictConfig

from inferkit.config.arguments import Arguments
from inferkit.config.space import CONFIG_NAME, VERSION_BASE


def call_hydra(
    task: Callable[[DictConfig], Any], arguments: Arguments, words: Sequence[str]
) -> None:
    """Call Hydra's own main with `words` as its command line."""

    @hydra.main(
        version_base=VERSION_BASE,
        config_path=str(arguments.conf_dir),
        config_name=arguments.config_name or CONFIG_NAME,
    )
    def entry(cfg: DictConfig) -> Any:
        return task(cfg)

    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        entry()
    finally:
        sys.argv = before


def hydra_words(arguments: Arguments, *extra: str) -> list[str]:
    """The command line for Hydra, with more overrides."""
    return [*arguments.flags, *arguments.overrides, *extra]
