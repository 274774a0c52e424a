"""From overrides to the typed configuration: what Python users and the command line call."""

import logging
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig

from inferkit.config.check import Checked, Checker
from inferkit.config.faults import Fault, render
from inferkit.config.schema import InferenceConfig
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError

logger = logging.getLogger(__name__)


def load_config(
    overrides: Sequence[str] = (), *, config_dir: Path | None = None
) -> InferenceConfig:
    """The configuration of `overrides`, checked, with automatic values resolved.

    Args:
        overrides: as on the command line, e.g. ["model=llama", "model.path=/models/tiny"].
        config_dir: a further folder of options.

    Raises:
        ConfigError: names every fault of the configuration.
    """
    checked = Checker(ConfigSpace(config_dir=config_dir)).check_overrides(overrides)
    return _accepted(checked)


def compose(overrides: Sequence[str] = (), *, config_dir: Path | None = None) -> DictConfig:
    """The configuration as Hydra composes it, its values unchecked and unresolved.

    Raises:
        ConfigError: it does not compose.
    """
    try:
        return ConfigSpace(config_dir=config_dir).compose_job(overrides)
    except HydraException as error:
        raise ConfigError(str(error)) from error


def to_inference_config(
    cfg: DictConfig, *, warnings: Sequence[Fault] | None = None
) -> InferenceConfig:
    """The typed configuration of a composed one, checked, with automatic values resolved.

    Args:
        warnings: what the pre-flight has found, which knows the command line too; told in place
            of what is found here.

    Raises:
        ConfigError: names every fault of the configuration.
    """
    return _accepted(Checker(ConfigSpace()).check_composed(cfg), warnings)


def _accepted(checked: Checked, warnings: Sequence[Fault] | None = None) -> InferenceConfig:
    for warning in checked.warnings if warnings is None else warnings:
        logger.warning("%s", warning)
    if checked.config is None:
        count = len(checked.faults)
        title = f"{count} fault{'s' if count > 1 else ''} in the configuration"
        raise ConfigError(render(checked.faults, title=title))
    return checked.config
