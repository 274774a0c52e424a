"""inferkit: a configuration-first executor of large language model inference.

    from inferkit import OfflineInference, SamplingParams, load_config
    llm = OfflineInference(load_config(["scheduler.batch_size=4"]))
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)

Names are imported when they are used: `import inferkit` loads neither torch nor hydra.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferkit.config.compose import load_config as load_config
    from inferkit.core.errors import ConfigError as ConfigError
    from inferkit.core.errors import InferkitError as InferkitError
    from inferkit.core.errors import KVCacheError as KVCacheError
    from inferkit.core.errors import ModelLoadError as ModelLoadError
    from inferkit.core.errors import RequestError as RequestError
    from inferkit.core.errors import WorkerError as WorkerError
    from inferkit.core.sampling_params import SamplingParams as SamplingParams
    from inferkit.offline.inference import OfflineInference as OfflineInference

_PLACES = {
    "ConfigError": "inferkit.core.errors",
    "InferkitError": "inferkit.core.errors",
    "KVCacheError": "inferkit.core.errors",
    "ModelLoadError": "inferkit.core.errors",
    "OfflineInference": "inferkit.offline.inference",
    "RequestError": "inferkit.core.errors",
    "SamplingParams": "inferkit.core.sampling_params",
    "WorkerError": "inferkit.core.errors",
    "load_config": "inferkit.config.compose",
}

__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'inferkit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
