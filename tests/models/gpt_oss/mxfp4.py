"""Random gpt-oss models with MXFP4 experts, and the plain models that they stand for."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.conftest import save_byte_tokenizer

GROUP = 32
"""Values that share a scale."""
CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CODES = torch.cat((CODES, -CODES))
SIZES = {"hidden_size": 64, "intermediate_size": 96}
"""Multiples of a group; shares of three and four ranks begin inside one."""


def quantised(weight_EKR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [E, R, K/32, 16] and scales [E, R, K/32], both uint8, of a weight [E, K, R]."""
    values = weight_EKR.transpose(1, 2).unflatten(-1, (-1, GROUP))
    # The largest value of a group gets the code 4 or 6.
    exponents = values.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    scaled = values * torch.exp2(-exponents)[..., None]
    codes = (scaled[..., None] - CODES).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks.contiguous(), (exponents + 127).to(torch.uint8).contiguous()


def save_mxfp4_pair(source: Path, mxfp4: Path, plain: Path) -> None:
    """Quantise the experts of the model in `source`: as MXFP4, and dequantised to float32.

    Transformers dequantises, so that the two agree by its reading of the layout.
    """
    coded: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            coded[name] = decoded[name] = tensor
            continue
        blocks, scales = quantised(tensor)
        coded[f"{name}_blocks"], coded[f"{name}_scales"] = blocks, scales
        plain_weight = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert plain_weight.shape == tensor.shape
        assert 0 < (plain_weight - tensor).abs().max() < 0.2
        decoded[name] = plain_weight.contiguous()
    config = json.loads((source / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    for folder, tensors, keys in (
        (mxfp4, coded, {"quantization_config": quantization}),
        (plain, decoded, {}),
    ):
        save_byte_tokenizer(folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | keys))
