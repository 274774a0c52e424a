"""Checkpoints: named tensors on disk, read one part at a time. Pickles are never opened.

A checkpoint speaks Hugging Face tensor names; it knows no model.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from inferkit.core.errors import ModelLoadError
from inferkit.core.file_identity import facts_of
from inferkit.loader.slices import complete_index, contiguous_runs, part_shape

INDEX_NAME = "model.safetensors.index.json"
MODEL_NAME = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""safetensors types of a plain weight."""
CODE_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
"""Types that become weights with scales."""
MAX_HEADER_BYTES = 100_000_000
NUM_NAMED = 5
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint(Protocol):
    """Tensors by Hugging Face name; only `read` touches their data."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensor data that `read` has taken from disk so far."""
        ...

    def names(self) -> list[str]: ...

    def dtype(self, name: str) -> torch.dtype:
        """The type that `read` gives."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def num_bytes(self, name: str) -> int:
        """Bytes of the tensor on disk."""
        ...

    def read(self, name: str, *index: slice) -> torch.Tensor:
        """A part of the tensor on the CPU in the type it is stored in (float32 for GGUF).

        `index` has one slice (step 1, bounds >= 0) per leading dimension; none selects all. Only
        the bytes of the part are read; for GGUF, those of its rows.
        """
        ...

    def identity(self) -> list[dict[str, Any]]:
        """Name, size and hash of each file (`core.file_identity`)."""
        ...


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint that is read when, and as far as, it is needed."""

    checkpoint: Checkpoint
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.checkpoint.shape(self.name)

    def read(self, *index: slice) -> torch.Tensor:
        """The part that `index` selects, as `Checkpoint.read` does."""
        return self.checkpoint.read(self.name, *index)


def some_of(names: list[str]) -> str:
    """The first names of a list, and how many there are in all, for a message."""
    shown = ", ".join(names[:NUM_NAMED])
    return shown if len(names) <= NUM_NAMED else f"{shown}, ... ({len(names)} in all)"


@dataclass(frozen=True)
class TensorEntry:
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""
    num_bytes: int


class SafetensorsCheckpoint:
    """One file, or the shards of an index; headers are read and checked by the constructor.

    Args:
        quantised: tensors may also be codes and scales.

    Raises:
        ModelLoadError: a file is absent, cut short or damaged, or a tensor has a type that
            is not allowed.
    """

    def __init__(
        self,
        files: list[Path],
        weight_map: Mapping[str, str] | None = None,
        *,
        quantised: bool = False,
    ) -> None:
        dtypes = DTYPES | CODE_DTYPES if quantised else DTYPES
        self.files = files
        self.num_bytes_read = 0
        self._entries: dict[str, TensorEntry] = {}
        for file in files:
            header, data_start = read_safetensors_header(file)
            for name, entry in _entries(file, header, data_start, dtypes):
                if weight_map is not None and weight_map.get(name) != file.name:
                    continue
                if name in self._entries:
                    first = self._entries[name].file.name
                    raise ModelLoadError(
                        f"tensor {name} is in both {first} and {file.name} of {file.parent}; keep "
                        f"one, or add {INDEX_NAME}"
                    )
                self._entries[name] = entry
        absent = sorted(set(weight_map or ()) - set(self._entries))
        if absent:
            raise ModelLoadError(
                f"{files[0].parent / INDEX_NAME} lists tensors that its files do not hold: "
                f"{some_of(absent)}; download the model again"
            )

    @classmethod
    def of_folder(cls, folder: Path, *, quantised: bool = False) -> "SafetensorsCheckpoint":
        """The model's weights in a Hugging Face folder: by index, else model.safetensors, else all.

        Raises:
            ModelLoadError: there are none; the message says what there is instead.
        """
        index = folder / INDEX_NAME
        if index.is_file():
            weight_map = _read_index(index)
            files = [folder / name for name in sorted(set(weight_map.values()))]
            absent = [file.name for file in files if not file.is_file()]
            if absent:
                raise ModelLoadError(
                    f"{index} names files that are not there: {some_of(absent)}; download them"
                )
            return cls(files, weight_map, quantised=quantised)
        if (folder / MODEL_NAME).is_file():
            return cls([folder / MODEL_NAME], quantised=quantised)
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelLoadError(_no_weights(folder))
        return cls(files, quantised=quantised)

    def names(self) -> list[str]:
        return list(self._entries)

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def num_bytes(self, name: str) -> int:
        return self._entries[name].num_bytes

    def read(self, name: str, *index: slice) -> torch.Tensor:
        # Plain reads instead of a mapping: mapped pages count as memory of this process until the
        # whole file is closed, which would double the peak while a model loads.
        entry = self._entries[name]
        part = complete_index(entry.shape, index)
        tensor = torch.empty(part_shape(part), dtype=entry.dtype)
        run_len, starts = contiguous_runs(entry.shape, part)
        run_bytes = run_len * tensor.itemsize
        buffer = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            with entry.file.open("rb", buffering=0) as stream:
                for idx, start in enumerate(starts):
                    run = buffer[idx * run_bytes : (idx + 1) * run_bytes]
                    offset = entry.offset + start * tensor.itemsize
                    num_read = _read_into(run, stream.fileno(), offset)
                    self.num_bytes_read += num_read
                    if num_read != run_bytes:
                        raise ModelLoadError(f"{entry.file} ends within {name}; download it again")
        except OSError as error:
            raise ModelLoadError(f"cannot read {name} from {entry.file}: {error}") from error
        return tensor

    def identity(self) -> list[dict[str, Any]]:
        facts = facts_of(self.files)
        return [{"name": f.name, **found} for f, found in zip(self.files, facts, strict=True)]


def _read_into(buffer: memoryview, descriptor: int, offset: int) -> int:
    """Fill `buffer` from `offset` of an open file; fewer bytes mean that the file ends there."""
    done = 0
    while done < len(buffer):  # one call of the system reads 2 GB at most
        num_read = os.preadv(descriptor, [buffer[done:]], offset + done)
        if num_read == 0:
            break
        done += num_read
    return done


def read_safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """(header, where the data starts); the file's length is checked."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        raw_length = stream.read(8)
        length = int.from_bytes(raw_length, "little")
        if len(raw_length) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelLoadError(f"{file} is no safetensors file, or it is cut short")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        end = max(
            (entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"),
            default=0,
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelLoadError(f"{file} has a damaged safetensors header: {error}") from error
    if size != 8 + length + end:
        raise ModelLoadError(
            f"{file} has {size} bytes, its header says {8 + length + end}; download it again"
        )
    return header, 8 + length


def _entries(
    file: Path, header: dict[str, Any], data_start: int, dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, TensorEntry]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape = tuple(entry["shape"])
        dtype = dtypes.get(entry["dtype"])
        start, end = entry["data_offsets"]
        if dtype is None:
            hint = " without a quantization_config in config.json" if dtypes == DTYPES else ""
            raise ModelLoadError(
                f"tensor {name} in {file} has type {entry['dtype']}; allowed are "
                f"{', '.join(dtypes)}{hint}"
            )
        if end - start != prod(shape) * dtype.itemsize:
            raise ModelLoadError(f"tensor {name} in {file} has {end - start} bytes for {shape}")
        yield name, TensorEntry(file, dtype, shape, data_start + start, end - start)


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        pairs = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{index} is no index of a sharded model: {error!r}") from error
    outside = sorted({file for file in pairs.values() if Path(file).name != file})
    foreign = sorted({file for file in pairs.values() if not file.endswith(".safetensors")})
    if outside or foreign or not pairs:
        raise ModelLoadError(
            f"{index} must name *.safetensors files of its own folder, not "
            f"{some_of(outside or foreign) or 'nothing'}"
        )
    return pairs


def _no_weights(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{folder} holds pickled weights only ({some_of(pickles)}); pickles can run code and "
            "are never loaded: convert them to safetensors (save_pretrained of transformers)"
        )
    return f"{folder} holds no *.safetensors file; download the model's weights into it"
