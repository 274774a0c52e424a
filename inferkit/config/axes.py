"""What a file of conf/sweep sweeps, for those who look at one configuration of it."""

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from inferkit.config.faults import key_of


def swept(hydra: DictConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Key or group -> its values, as the file has them; without those that an override sets.

    Args:
        hydra: Hydra's own part of the composition.
        overrides: those that were typed.
    """
    params = OmegaConf.select(hydra, "sweeper.params")
    axes = OmegaConf.to_container(params, resolve=False) if params is not None else {}
    assert isinstance(axes, dict), "parameters of a sweeper have names"
    typed = {key_of(text) for text in overrides}
    names = {str(name).lstrip("+~"): str(values) for name, values in axes.items()}
    return {name: values for name, values in names.items() if name not in typed}
