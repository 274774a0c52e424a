"""Quantised checkpoints give the values that their codes and scales stand for, part by part."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from inferkit.core.errors import ModelLoadError
from inferkit.layers.weights import StoredTensor, load_slice
from inferkit.loader.checkpoint import Checkpoint, SafetensorsCheckpoint
from inferkit.loader.default_loader import DefaultModelLoader
from inferkit.loader.dequantize import dequantized
from inferkit.loader.source import resolve_source

FP8 = {"quant_method": "fp8", "weight_block_size": [4, 3]}
MXFP4 = {"quant_method": "mxfp4"}
NAME = "mlp.experts.gate_up_proj"


def write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    save_file(dict(tensors), folder / "model.safetensors")
    return SafetensorsCheckpoint.of_folder(folder, quantised=True)


def fp8_tensors(num_rows: int, num_columns: int, block: list[int]) -> dict[str, torch.Tensor]:
    num_blocks = -(-num_rows // block[0]), -(-num_columns // block[1])
    return {
        "w.weight": torch.randn(num_rows, num_columns).mul(50).to(torch.float8_e4m3fn),
        "w.weight_scale_inv": torch.rand(num_blocks) + 0.01,
        "norm.weight": torch.randn(num_columns).bfloat16(),
    }


def plain_fp8(tensors: Mapping[str, torch.Tensor], block: list[int]) -> torch.Tensor:
    """Element by element, as the layout is described."""
    codes, scales = tensors["w.weight"].float(), tensors["w.weight_scale_inv"]
    values = torch.empty_like(codes)
    for row, column in itertools.product(*map(range, codes.shape)):
        values[row, column] = codes[row, column] * scales[row // block[0], column // block[1]]
    return values


def mxfp4_tensors(num_experts: int, num_rows: int, num_groups: int) -> dict[str, torch.Tensor]:
    shape = num_experts, num_rows, num_groups
    return {
        f"{NAME}_blocks": torch.randint(256, (*shape, 16)).to(torch.uint8),
        f"{NAME}_scales": torch.randint(110, 135, shape).to(torch.uint8),
        f"{NAME}_bias": torch.randn(num_experts, num_rows).bfloat16(),
    }


@pytest.mark.parametrize(("num_rows", "num_columns"), [(8, 9), (10, 7), (3, 2), (5, 13)])
def test_fp8_gives_code_times_scale_for_every_part(
    num_rows: int, num_columns: int, tmp_path: Path
) -> None:
    tensors = fp8_tensors(num_rows, num_columns, FP8["weight_block_size"])
    expected = plain_fp8(tensors, FP8["weight_block_size"])
    checkpoint = dequantized(write(tmp_path, tensors), FP8)
    assert sorted(checkpoint.names()) == ["norm.weight", "w.weight"]
    assert checkpoint.shape("w.weight") == (num_rows, num_columns)
    assert checkpoint.num_bytes("w.weight") == sum(
        tensors[name].nbytes for name in ("w.weight", "w.weight_scale_inv")
    )
    assert torch.equal(checkpoint.read("w.weight"), expected)
    assert torch.equal(checkpoint.read("norm.weight", slice(1, 2)), tensors["norm.weight"][1:2])
    bounds = [
        slice(start, stop) for start in range(num_rows) for stop in range(start, num_rows + 1)
    ]
    for rows, columns in itertools.product(bounds, [slice(None), *bounds[:: num_rows + 2]]):
        part = checkpoint.read("w.weight", rows, columns)
        assert part.dtype == checkpoint.dtype("w.weight") == torch.float32
        assert torch.equal(part, expected[rows, columns]), (rows, columns)


@pytest.mark.parametrize(
    ("index", "num_codes", "num_scales"),
    [
        ((), 512 * 384, 4 * 3),
        ((slice(128, 256),), 128 * 384, 3),
        ((slice(100, 140),), 40 * 384, 2 * 3),
        ((slice(None), slice(96, 192)), 512 * 96, 4 * 2),
        ((slice(500, 512), slice(383, 384)), 12, 1),
        ((slice(7, 7),), 0, 0),
    ],
)
def test_fp8_reads_the_codes_and_scales_of_the_part(
    index: tuple[slice, ...], num_codes: int, num_scales: int, tmp_path: Path
) -> None:
    block = [128, 128]
    config = {"quant_method": "fp8", "weight_block_size": block, "fmt": "e4m3"}
    tensors = fp8_tensors(512, 384, block)
    checkpoint = dequantized(write(tmp_path, tensors), config)
    part = checkpoint.read("w.weight", *index)
    assert checkpoint.num_bytes_read == num_codes + 4 * num_scales
    scales = tensors["w.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(part, (tensors["w.weight"].float() * scales)[index])


def test_fp8_agrees_with_transformers(tmp_path: Path) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    tensors = fp8_tensors(256, 384, [128, 128])
    checkpoint = dequantized(write(tmp_path, tensors), FP8 | {"weight_block_size": [128, 128]})
    theirs = fp8.Fp8Dequantize(None).convert(
        {"weight": tensors["w.weight"], "weight_scale_inv": tensors["w.weight_scale_inv"]}
    )
    assert torch.equal(checkpoint.read("w.weight"), theirs["weight"])


def test_mxfp4_gives_the_values_of_transformers_for_every_part(tmp_path: Path) -> None:
    tensors = mxfp4_tensors(4, 6, 3)
    expected = convert_moe_packed_tensors(tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"])
    checkpoint = dequantized(write(tmp_path, tensors), MXFP4)
    assert sorted(checkpoint.names()) == [NAME, f"{NAME}_bias"]
    assert checkpoint.shape(NAME) == (4, 96, 6) == tuple(expected.shape)
    assert checkpoint.num_bytes(NAME) == 4 * 6 * 3 * 17
    assert torch.equal(checkpoint.read(NAME), expected)
    for index in itertools.product(
        [slice(None), slice(1, 3), slice(2, 2)],
        [slice(None), slice(32, 64), slice(31, 33), slice(5, 96), slice(40, 40)],
        [slice(None), slice(3, 6), slice(5, 99), slice(0, 0)],
    ):
        part = checkpoint.read(NAME, *index)
        assert part.dtype == checkpoint.dtype(NAME) == torch.bfloat16
        assert torch.equal(part, expected[index]), index


def test_mxfp4_values_are_exact_at_every_code_and_scale(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    tensors = {"w_blocks": codes, "w_scales": scales}
    values = dequantized(write(tmp_path, tensors), MXFP4).read("w")[0].T.double()
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    row = torch.tensor([table[n] for byte in range(256) for n in (byte & 15, byte >> 4)]).double()
    expected = torch.stack([row * 2.0 ** (scale - 127) for scale in range(255)])
    largest = torch.finfo(torch.bfloat16).max
    assert torch.equal(values.clamp(-largest, largest), expected.clamp(-largest, largest))


@pytest.mark.parametrize(
    ("index", "num_groups"),
    [
        ((), 4 * 6 * 3),
        ((slice(1, 2),), 6 * 3),
        ((slice(None), slice(None), slice(2, 5)), 4 * 3 * 3),
        ((slice(None), slice(32, 64)), 4 * 6),
        ((slice(None), slice(31, 33)), 4 * 6 * 2),
        ((slice(0, 2), slice(64, 96), slice(0, 3)), 2 * 3),
        ((slice(3, 3),), 0),
    ],
)
def test_mxfp4_reads_the_groups_of_the_part(
    index: tuple[slice, ...], num_groups: int, tmp_path: Path
) -> None:
    checkpoint = dequantized(write(tmp_path, mxfp4_tensors(4, 6, 3)), MXFP4)
    checkpoint.read(NAME, *index)
    assert checkpoint.num_bytes_read == 17 * num_groups


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq"}, r"quant_method='gptq'; allowed are fp8, mxfp4; use the model's"),
        ({}, "quant_method=None; allowed are"),
        ("fp8", "quant_method=None; allowed are"),
        ({"quant_method": "fp8"}, "weight_block_size=None; allowed for fp8 are two sizes"),
        (FP8 | {"weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]; allowed"),
    ],
)
def test_another_method_is_refused_before_the_weights_are_looked_at(
    config: Any, message: str, tmp_path: Path
) -> None:
    save_file({"w.qweight": torch.zeros(2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ModelLoadError, match=rf"config\.json has quantization_config\.{message}"):
        resolve_source(str(tmp_path))
    resolve_source(str(tmp_path), with_weights=False)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (FP8, {"w": torch.zeros(8, 9, dtype=torch.float8_e4m3fn)}, "to dequantise w: no tensor of"),
        (MXFP4, {"w_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8)}, "dequantise w_blocks"),
        (MXFP4, {"w_scales": torch.zeros(1, 2, 3, dtype=torch.uint8)}, "dequantise w_scales"),
        (
            FP8,
            {"w": torch.zeros(8, 9).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(2, 4)},
            r"w_scale_inv has shape \(2, 4\); w of shape \(8, 9\) needs one scale per block of 4 x",
        ),
        (
            FP8,
            {
                "w": torch.zeros(8, 9).to(torch.float8_e4m3fn),
                "w_scale_inv": torch.ones(2, 3).to(torch.uint8),
            },
            "w_scale_inv has type torch.uint8; allowed are F64",
        ),
        (
            MXFP4,
            {
                "w_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8),
                "w_scales": torch.zeros(1, 2, 4, dtype=torch.uint8),
            },
            r"w_scales has shape \(1, 2, 4\), w_blocks \(1, 2, 3, 16\); allowed are",
        ),
        (
            MXFP4,
            {"w_blocks": torch.zeros(1, 2, 3, 16), "w_scales": torch.zeros(1, 2, 3)},
            "w_blocks and w_scales must have type U8",
        ),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_named(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        dequantized(write(tmp_path, tensors), config)


class Rank(nn.Module):
    """Half of the rows of a layer."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.start = 4 * rank
        self.w = nn.Linear(9, 4, bias=False, dtype=dtype)
        self.w.weight.weight_loader = self.load_rows  # type: ignore[assignment]
        self.norm = nn.RMSNorm(9, dtype=dtype)

    def load_rows(self, parameter: torch.Tensor, stored: StoredTensor, shard_id: None) -> None:
        load_slice(parameter, stored, dim=0, start=self.start)

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        return {"w.weight": (8, 9), "norm.weight": (9,)}

    def ignored_tensors(self, name: str) -> bool:
        return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_model_is_loaded_by_every_rank(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = fp8_tensors(8, 9, FP8["weight_block_size"])
    identity = write(tmp_path, tensors).identity()
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    weights, calls = [], []
    for rank in range(2):
        source = resolve_source(str(tmp_path))
        model = Rank(rank, dtype)
        DefaultModelLoader().load(model, source, progress=lambda *counts: calls.append(counts))
        weights.append(model.w.weight)
        assert source.checkpoint.num_bytes_read == 4 * 9 + 4 * 3 + 2 * 9
        assert calls[-1] == (8 * 9 + 4 * 6 + 2 * 9,) * 2
        assert source.identity()["weights"] == identity
    expected = plain_fp8(tensors, FP8["weight_block_size"])
    assert torch.equal(torch.cat(weights), expected.to(dtype))
