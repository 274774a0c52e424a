"""Quantised checkpoints as plain ones: a part of a tensor is dequantised when it is read.

Knows two layouts of published checkpoints, by `quantization_config` of config.json: fp8 with a
scale per block (DeepSeek-V3) and mxfp4 (gpt-oss). Activations are never quantised.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from inferkit.core.errors import ModelLoadError
from inferkit.loader.checkpoint import DTYPES, Checkpoint, some_of
from inferkit.loader.slices import complete_index

FP8 = "fp8"
MXFP4 = "mxfp4"
METHODS = (FP8, MXFP4)
SCALE_SUFFIX = "_scale_inv"
BLOCKS_SUFFIX = "_blocks"
SCALES_SUFFIX = "_scales"
MXFP4_GROUP = 32
"""Values that share a scale; two lie in a byte."""
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


class QuantisedTensor(Protocol):
    """A tensor that a checkpoint keeps as one of codes and one of scales."""

    @property
    def sources(self) -> tuple[str, str]:
        """Codes and scales, by their names in the checkpoint."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, *index: slice) -> torch.Tensor: ...


class DequantisedCheckpoint:
    """The checkpoint below it with plain tensors in place of codes and scales."""

    def __init__(self, checkpoint: Checkpoint, tensors: Mapping[str, QuantisedTensor]) -> None:
        self.checkpoint = checkpoint
        self._tensors = dict(tensors)
        plain_names = {tensor.sources[0]: name for name, tensor in tensors.items()}
        scales = {tensor.sources[1] for tensor in tensors.values()}
        self._names = [
            plain_names.get(name, name) for name in checkpoint.names() if name not in scales
        ]

    @property
    def num_bytes_read(self) -> int:
        return self.checkpoint.num_bytes_read

    def names(self) -> list[str]:
        return list(self._names)

    def dtype(self, name: str) -> torch.dtype:
        tensor = self._tensors.get(name)
        return self.checkpoint.dtype(name) if tensor is None else tensor.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensors.get(name)
        return self.checkpoint.shape(name) if tensor is None else tensor.shape

    def num_bytes(self, name: str) -> int:
        sources = self._tensors[name].sources if name in self._tensors else (name,)
        return sum(self.checkpoint.num_bytes(source) for source in sources)

    def read(self, name: str, *index: slice) -> torch.Tensor:
        tensor = self._tensors.get(name)
        return self.checkpoint.read(name, *index) if tensor is None else tensor.read(*index)

    def identity(self) -> list[dict[str, Any]]:
        return self.checkpoint.identity()


@dataclass(frozen=True)
class Fp8Tensor:
    """Codes [N, K] in float8_e4m3fn, and a factor for each block of them."""

    checkpoint: Checkpoint
    sources: tuple[str, str]
    block: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.checkpoint.shape(self.sources[0])

    def read(self, *index: slice) -> torch.Tensor:
        rows, columns = complete_index(self.shape, index)
        codes, scales = self.sources
        block_rows, block_columns = self.block
        values = self.checkpoint.read(codes, rows, columns).float()
        scales_BC = self.checkpoint.read(
            scales, _blocks(rows, block_rows), _blocks(columns, block_columns)
        ).float()
        column_blocks = torch.arange(columns.start, columns.stop) // block_columns
        scales_BK = scales_BC[:, column_blocks - columns.start // block_columns]
        edges = range(block_rows - rows.start % block_rows, len(values), block_rows)
        if values.numel():
            for block, scale_K in zip(values.tensor_split(tuple(edges)), scales_BK, strict=True):
                block.mul_(scale_K)
        return values


@dataclass(frozen=True)
class Mxfp4Tensor:
    """Codes [E, R, G, 16] of two values per byte and scales [E, R, G]; as a tensor [E, G*32, R]."""

    checkpoint: Checkpoint
    sources: tuple[str, str]

    @property
    def dtype(self) -> torch.dtype:
        # Has the values exactly: one mantissa bit, and the exponents of float32.
        return torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        num_experts, num_rows, num_groups, _ = self.checkpoint.shape(self.sources[0])
        return num_experts, num_groups * MXFP4_GROUP, num_rows

    def read(self, *index: slice) -> torch.Tensor:
        experts, columns, rows = complete_index(self.shape, index)
        groups = _blocks(columns, MXFP4_GROUP)
        codes, scales = self.sources
        codes_ERGB = self.checkpoint.read(codes, experts, rows, groups)
        scales_ERG = self.checkpoint.read(scales, experts, rows, groups)
        pair_table, scale_table = _mxfp4_tables()
        values_ERGV = torch.empty(*scales_ERG.shape, MXFP4_GROUP, dtype=self.dtype)
        # One expert at a time bounds the indices, which are wider than the codes.
        for values, code_bytes, scale_bytes in zip(
            values_ERGV, codes_ERGB, scales_ERG, strict=True
        ):
            pairs = pair_table.index_select(0, code_bytes.reshape(-1).int())
            factors = scale_table.index_select(0, scale_bytes.reshape(-1).int())
            torch.mul(
                pairs.view(self.dtype).view(values.shape),
                factors.view(scale_bytes.shape).unsqueeze(-1),
                out=values,
            )
        first = groups.start * MXFP4_GROUP
        values_EKR = values_ERGV.flatten(2).transpose(1, 2)
        return values_EKR[:, columns.start - first : columns.stop - first]


def _mxfp4_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """For each byte of codes its two bfloat16 values as one int32, and for each scale its value."""
    values = torch.tensor(_E2M1 + [-value for value in _E2M1])
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).bfloat16()
    scales = torch.ldexp(torch.ones(256), byte - 127).bfloat16()
    return pairs.view(torch.int32).view(-1), scales


def check_quantization(config: Any, origin: str = "config.json") -> None:
    """Refuse a `quantization_config` that cannot be dequantised; no weights are needed for it.

    Raises:
        ModelLoadError: names the method of `origin`, what is allowed and what to do.
    """
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if method not in METHODS:
        raise ModelLoadError(
            f"{origin} has quantization_config.quant_method={method!r}; allowed are "
            f"{', '.join(METHODS)}; use the model's unquantised weights, or save it dequantised"
        )
    block = config.get("weight_block_size")
    if method == FP8 and not (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(size, int) and size > 0 for size in block)
    ):
        raise ModelLoadError(
            f"{origin} has quantization_config.weight_block_size={block!r}; allowed for {FP8} are "
            "two sizes, for instance [128, 128]; use the model's unquantised weights"
        )


def dequantized(
    checkpoint: Checkpoint, quantization_config: Mapping[str, Any], origin: str = "config.json"
) -> Checkpoint:
    """The plain tensors that `checkpoint` stands for; the tensors of scales are hidden.

    fp8 gives float32 (code * scale), mxfp4 bfloat16, which holds its values exactly. Tensors
    without scales pass through.

    Raises:
        ModelLoadError: the method is not supported, or codes and scales do not fit together.
    """
    check_quantization(quantization_config, origin)
    tensors: dict[str, QuantisedTensor]
    if quantization_config["quant_method"] == FP8:
        block_rows, block_columns = quantization_config["weight_block_size"]
        tensors = dict(_fp8_tensors(checkpoint, (block_rows, block_columns)))
    else:
        tensors = dict(_mxfp4_tensors(checkpoint))
    plain = DequantisedCheckpoint(checkpoint, tensors)
    coded = [name for name in plain.names() if plain.dtype(name) not in DTYPES.values()]
    if coded:
        raise ModelLoadError(
            f"quant_method={quantization_config['quant_method']} of {origin} does not say how to "
            f"dequantise {some_of(coded)}: no tensor of scales belongs to them; check the download"
        )
    return plain


def _fp8_tensors(
    checkpoint: Checkpoint, block: tuple[int, int]
) -> Iterator[tuple[str, QuantisedTensor]]:
    names = checkpoint.names()
    found = set(names)
    for name in names:
        scales = name + SCALE_SUFFIX
        if scales not in found or checkpoint.dtype(name) != torch.float8_e4m3fn:
            continue
        shape = checkpoint.shape(name)
        wanted = tuple(-(-size // step) for size, step in zip(shape, block, strict=False))
        if len(shape) != 2 or checkpoint.shape(scales) != wanted:
            raise ModelLoadError(
                f"tensor {scales} has shape {checkpoint.shape(scales)}; {name} of shape {shape} "
                f"needs one scale per block of {block[0]} x {block[1]}"
            )
        if checkpoint.dtype(scales) not in DTYPES.values():
            raise ModelLoadError(
                f"tensor {scales} has type {checkpoint.dtype(scales)}; allowed are "
                f"{', '.join(DTYPES)}"
            )
        yield name, Fp8Tensor(checkpoint, (name, scales), block)


def _mxfp4_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, QuantisedTensor]]:
    names = checkpoint.names()
    found = set(names)
    for name in names:
        plain = name.removesuffix(BLOCKS_SUFFIX)
        scales = plain + SCALES_SUFFIX
        if plain == name or scales not in found:
            continue
        shape = checkpoint.shape(name)
        if len(shape) != 4 or (*checkpoint.shape(scales), MXFP4_GROUP // 2) != shape:
            raise ModelLoadError(
                f"tensor {scales} has shape {checkpoint.shape(scales)}, {name} {shape}; allowed "
                f"are [E, R, G] and [E, R, G, {MXFP4_GROUP // 2}]"
            )
        if {checkpoint.dtype(name), checkpoint.dtype(scales)} != {torch.uint8}:
            raise ModelLoadError(f"tensors {name} and {scales} must have type U8")
        yield plain, Mxfp4Tensor(checkpoint, (name, scales))


def _blocks(part: slice, block_size: int) -> slice:
    """The blocks that hold the elements of `part`."""
    if part.start == part.stop:
        return slice(0, 0)
    return slice(part.start // block_size, -(-part.stop // block_size))
