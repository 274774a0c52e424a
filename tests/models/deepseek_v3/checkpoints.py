"""Checkpoints made of a tiny model's: in FP8 with block scales, and with MTP layers."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = (32, 24)
"""Divides no size of the tiny model, so that heads and shares begin inside of a block."""
LARGEST_FP8 = 448.0
QUANTISED = ("_proj.weight", "_proj_with_mqa.weight")


def copy_with(directory: Path, source: Path, tensors: dict[str, torch.Tensor], **config) -> None:
    """The model folder `source` with other tensors, and other keys in its config.json."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    keys = json.loads((source / "config.json").read_text("utf-8"))
    (directory / "config.json").write_text(json.dumps(keys | config), "utf-8")


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in float8_e4m3fn [N, K] and a float32 factor per block."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    grid = [-(-size // step) for size, step in zip(weight.shape, BLOCK, strict=True)]
    scales = torch.empty(grid)
    for row, column in torch.cartesian_prod(*map(torch.arange, grid)).tolist():
        part = (
            slice(row * BLOCK[0], (row + 1) * BLOCK[0]),
            slice(column * BLOCK[1], (column + 1) * BLOCK[1]),
        )
        scales[row, column] = weight[part].abs().max() / LARGEST_FP8
        codes[part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


def dequantised(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    factors = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return codes.float() * factors[: codes.shape[0], : codes.shape[1]]


def save_fp8(directory: Path, plain_directory: Path, source: Path) -> None:
    """The model in FP8 as published, and in float32 with the values that these codes mean."""
    coded, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        coded[name] = plain[name] = tensor
        if name.endswith(QUANTISED):
            codes, scales = quantised(tensor)
            coded[name], coded[f"{name}_scale_inv"] = codes, scales
            plain[name] = dequantised(codes, scales)
    copy_with(plain_directory, source, plain)
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    }
    copy_with(directory, source, coded, quantization_config=quantization)


def mtp_tensors(source: Path, layer_idx: int, like_idx: int) -> dict[str, torch.Tensor]:
    """Tensors of one MTP layer, whose block is random but shaped like layer `like_idx`."""
    generator = torch.Generator().manual_seed(layer_idx)
    tensors = load_file(source / "model.safetensors")
    prefix, like = f"model.layers.{layer_idx}.", f"model.layers.{like_idx}."
    shapes = {
        name.removeprefix(like): tensor.shape
        for name, tensor in tensors.items()
        if name.startswith(like)
    }
    vocab_size, hidden = tensors["lm_head.weight"].shape
    shapes |= {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (vocab_size, hidden),
        "embed_tokens.weight": (vocab_size, hidden),
    }
    return {
        f"{prefix}{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
