"""What a run is, as a hash: two runs of one key would compute the same thing.

A sweep that is resumed reuses the cells whose key has stayed. Torch-free. Files of a model count by
their contents (`core.file_identity`): the hash of weights is computed once and kept in the cache.
"""

import hashlib
import importlib.util
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferkit.config.model_files import is_own, read_model_files
from inferkit.config.provenance import package_versions, plain
from inferkit.config.schema import InferenceConfig
from inferkit.core.file_identity import facts_of, file_hash
from inferkit.core.model_cache import EMBEDDED_PREFIX

PACKAGE_DIR = Path(__file__).resolve().parent.parent
CODE_FILE = "code.json"
"""In a run directory: the hash of every file of the code that ran."""
LEFT_OUT: Mapping[str, str] = {
    "sweep": "how a sweep is run and judged, not what a cell computes",
    "model.path": "a place; the files that lie there count",
    "data.dataset_path": "a place; the files that lie there count",
    "parallel.node_ips": "addresses; their number counts",
    "parallel.master_port": "a port",
    "disagg.prefill_ips": "addresses; their number counts",
    "disagg.decode_ips": "addresses; their number counts",
    "disagg.bootstrap_port": "a port",
    "disagg.http_host": "an address",
    "disagg.http_port": "a port",
    "disagg.zmq_port": "a port",
    "disagg.router_url": "an address",
    "disagg.secret_env": "a name of a variable",
    "router.host": "an address",
    "router.port": "a port",
    "router.prefill_urls": "addresses; their number counts",
    "router.decode_urls": "addresses; their number counts",
}
"""Keys that do not change what a run computes -> why."""
CLUSTER_WORDS = ("prefill_overrides", "decode_overrides")
PACKAGES = ("torch", "torch_npu", "transformers", "tokenizers")
"""Packages whose version changes tokens or speed."""
WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def run_key(config: InferenceConfig) -> str:
    """sha256 over all that decides what a run computes: 64 hexadecimal digits.

    It covers the resolved configuration without the keys of LEFT_OUT, the code (of this checkout
    or installation as it lies on disk, of components outside inferkit, and the versions of
    PACKAGES), and the files of model and data set. A Hugging Face id counts by its name alone, so
    that its download changes nothing. The host does not count.

    Raises:
        OSError: a file of the model or the data set cannot be read.
    """
    return RunKeys().key(config)


class RunKeys:
    """Keys of many configurations: what they share is read once."""

    def __init__(self) -> None:
        self._files: dict[str, dict[str, Any]] = {}
        self._own_code = digest(code_files())
        versions = package_versions()
        self._versions = {name: versions[name] for name in PACKAGES}

    def key(self, config: InferenceConfig) -> str:
        """See `run_key`."""
        facts = self.facts(config)
        parts = {name: facts[name] for name in ("code", "components", "model", "dataset")}
        kept = without_places(plain(_without_context(config)))
        return digest({"config": kept, "versions": self._versions, **parts})

    def facts(self, config: InferenceConfig) -> dict[str, Any]:
        """What the key is made of beside the configuration and versions, for the record.

        code: hash over `code_files`. components: package -> the same of a user's own. model,
        dataset: name -> size and hash.
        """
        model = (config.model.path, config.model.with_ckpt)
        return {
            "code": self._own_code,
            "components": {
                name: digest(self._once(component_files, name))
                for name in components(plain(config))
            },
            "model": self._once(_model_files, model),
            "dataset": self._once(_dataset_files, config.data.dataset_path),
        }

    def _once(self, function: Callable[[Any], dict[str, Any]], argument: Any) -> dict[str, Any]:
        """`function(argument)`, computed once."""
        name = f"{function.__name__} {argument}"
        if name not in self._files:
            self._files[name] = function(argument)
        return self._files[name]


def digest(value: Any) -> str:
    """sha256 of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def without_places(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values without those of LEFT_OUT; of a list of addresses its length stays.

    Keys that are not there (of an older version) are no error.
    """
    kept = json.loads(json.dumps(values))
    for key in LEFT_OUT:
        *nodes, name = key.split(".")
        node = kept
        for part in nodes:
            node = node.get(part, {})
        value = node.pop(name, None)
        if isinstance(value, list):
            node[name] = len(value)
    cluster = kept.get("cluster", {})
    cluster |= {name: _counting_words(cluster[name]) for name in CLUSTER_WORDS if name in cluster}
    return dict(kept)


def _counting_words(text: str) -> list[str]:
    """Words of one side of a cluster without those that only name places."""
    try:
        words = shlex.split(text)
    except ValueError:  # an open quote; the check of the cluster tells it
        return [text]
    return [word for word in words if word.partition("=")[0].lstrip("+") not in LEFT_OUT]


def _without_context(config: InferenceConfig) -> InferenceConfig:
    """An embedded model's context, which a role takes for its own, is 0 until the first run has
    fetched the model: that run and the next have one key."""
    path, scheduler = config.model.path or "", config.scheduler
    if config.role is None or not path.startswith(EMBEDDED_PREFIX):
        return config
    arch = read_model_files(config, {}).arch
    context = 0 if arch is None else int(arch.max_context_len)
    if config.engine.max_model_len != context:
        return config
    if not scheduler.enable_chunked_prefill and scheduler.max_prefill_tokens == context:
        scheduler = replace(scheduler, max_prefill_tokens=0)
    return replace(config, engine=replace(config.engine, max_model_len=0), scheduler=scheduler)


# -- code --------------------------------------------------------------------------------------


def code_files(folder: Path = PACKAGE_DIR) -> dict[str, str]:
    """Name -> hash of every file of the package that a run can read: code and options.

    `models` and `conf` lie below it, in a checkout as links. Names are relative, with slashes.
    """
    return {
        path.relative_to(folder).as_posix(): file_hash(path)
        for path in _walk(folder)
        if path.suffix not in (".pyc", ".md") and not path.name.endswith("~")
    }


def components(values: Any) -> list[str]:
    """Top-level packages outside inferkit that a configuration takes classes from."""
    found = {target.partition(".")[0] for target in _targets(values) if not is_own(target)}
    return sorted(found - {""})


def _targets(node: Any) -> Iterator[str]:
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in ("_target_", "mtp_target") and isinstance(value, str):
            yield value
        else:
            yield from _targets(value)


def component_files(package: str) -> dict[str, str]:
    """Name -> hash of the Python files of a user's top-level package or module, without importing
    it; empty where it is not found."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was made by hand, `__main__` for one
        return {}
    if spec is None:
        return {}
    if spec.submodule_search_locations is None:
        return {package: file_hash(Path(spec.origin))} if spec.has_location and spec.origin else {}
    return {
        path.relative_to(folder).as_posix(): file_hash(path)
        for folder in map(Path, spec.submodule_search_locations)
        for path in _walk(folder)
        if path.suffix == ".py"
    }


def _walk(folder: Path) -> Iterator[Path]:
    """Files below `folder` in a fixed order; hidden ones and byte code are left out."""
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(f for f in folders if f != "__pycache__" and not f.startswith("."))
        yield from (Path(place, name) for name in sorted(files) if not name.startswith("."))


# -- files of model and data set ---------------------------------------------------------------


def _model_files(source: tuple[str | None, bool]) -> dict[str, Any]:
    """Name -> size and hash of the files of a model.

    Args:
        source: `model.path`, `model.with_ckpt`.
    """
    path, with_weights = source
    if path is None:
        return {}
    if path.startswith(EMBEDDED_PREFIX):
        return {"embedded": path}  # its version pins the hash of its weights
    place = Path(path).expanduser()
    if place.is_file():
        return {place.suffix: facts_of([place])[0]}
    if not place.is_dir():
        return {"hub": path}
    files = [
        file
        for file in sorted(place.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and file.suffix != ".md"
        and (with_weights or file.suffix not in WEIGHT_SUFFIXES)
    ]
    return dict(zip((file.name for file in files), facts_of(files), strict=True))


def _dataset_files(path: str | None) -> dict[str, Any]:
    """Number -> size and hash of the files of a data set; empty for the built-in prompts."""
    if path is None:
        return {}
    place = Path(path).expanduser()
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place] * place.is_file()
    return {
        str(number): {"size": file.stat().st_size, "sha256": file_hash(file)}
        for number, file in enumerate(files)
    }
