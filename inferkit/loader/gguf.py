"""GGUF files: Hugging Face names and keys for what llama.cpp wrote, weights dequantised.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Covers the architectures llama
(Llama, SmolLM2, Mistral), qwen2 and qwen3.
"""

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from inferkit.core.errors import ModelLoadError
from inferkit.core.file_identity import file_facts
from inferkit.loader.slices import complete_index

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FREQS = "rope_freqs.weight"
ROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
_ROPE_TENSORS = {ROPE_FREQS, *ROPE_FACTORS.values()}
# Llama 3.1 to 3.3: every release has these; a GGUF keeps only the factor of each pair.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


class GGUFCheckpoint:
    """Tensors of one GGUF file under their Hugging Face names.

    Raises:
        ModelLoadError: the file is damaged, one of several parts, or of another architecture.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.num_bytes_read = 0
        try:
            self._reader = gguf.GGUFReader(file)
        except (ValueError, OSError, IndexError, KeyError, TypeError) as error:
            raise ModelLoadError(f"{file} is no GGUF file, or it is damaged: {error}") from error
        self.architecture = str(self._metadata("general.architecture", ""))
        if self.architecture not in ARCHITECTURES:
            raise ModelLoadError(
                f"{file} has general.architecture={self.architecture!r}; allowed are "
                f"{', '.join(ARCHITECTURES)}"
            )
        if self._metadata("split.count", 1) > 1:
            raise ModelLoadError(
                f"{file} is one of {self._metadata('split.count')} parts; join them with "
                "llama-gguf-split --merge"
            )
        self._raw = {tensor.name: tensor for tensor in self._reader.tensors}
        self._tensors = {
            hf_name(name): tensor for name, tensor in self._raw.items() if name not in _ROPE_TENSORS
        }

    def names(self) -> list[str]:
        return list(self._tensors)

    def dtype(self, name: str) -> torch.dtype:
        del name
        return torch.float32

    def shape(self, name: str) -> tuple[int, ...]:
        # GGUF counts dimensions from the innermost.
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def num_bytes(self, name: str) -> int:
        return int(self._tensors[name].n_bytes)

    def read(self, name: str, *index: slice) -> torch.Tensor:
        """A part of the dequantised tensor in float32; whole rows (or a whole vector) are read."""
        raw = self._tensors[name]
        shape = self.shape(name)
        part = complete_index(shape, index)
        rows = self._rows(name)[part[0]]
        if len(shape) == 1:
            values = self._dequantise(raw, raw.data)[rows]
        else:
            in_order = bool((np.diff(rows) == 1).all())
            data = raw.data[part[0]] if in_order else raw.data[rows]
            values = self._dequantise(raw, data).reshape(len(rows), *shape[1:])[:, *part[1:]]
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def _rows(self, name: str) -> "np.ndarray[Any, Any]":
        """The rows of the file in the order of Hugging Face."""
        rows = np.arange(self.shape(name)[0])
        if self.architecture == "llama" and ".self_attn." in name:
            if ".q_proj." in name:
                return _split_halves(rows, self._count("attention.head_count"))
            if ".k_proj." in name:
                return _split_halves(rows, self._num_kv_heads())
        return rows

    def identity(self) -> list[dict[str, Any]]:
        return [{"name": self.file.name, **file_facts(self.file)}]

    def config(self) -> dict[str, Any]:
        """The keys of the config.json that this file stands for.

        Raises:
            ModelLoadError: a key that decides the model's numbers is absent or not understood.
        """
        num_heads = self._count("attention.head_count")
        hidden_size = self._count("embedding_length")
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "hidden_size": hidden_size,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._num_kv_heads(),
            "head_dim": int(self._key("attention.key_length", hidden_size // num_heads)),
            "hidden_act": "silu",
            "rms_norm_eps": float(self._key("attention.layer_norm_rms_epsilon", 1e-6)),
            "max_position_embeddings": self._count("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self._token_id("bos_token_id"),
            "eos_token_id": self._token_id("eos_token_id"),
            "pad_token_id": self._token_id("padding_token_id"),
            "rope_parameters": self._rope_parameters(),
        }
        if self.architecture != "qwen2":
            config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._tensors
        if self.architecture == "llama":
            config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in self._tensors
        return config

    def _rope_parameters(self) -> dict[str, Any]:
        theta = float(self._key("rope.freq_base", 10_000.0))
        rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
        kind = str(self._key("rope.scaling.type", "none"))
        attention_factor = self._key("rope.scaling.attn_factor", None)
        if kind == "linear":
            rope |= {"rope_type": "linear", "factor": float(self._key("rope.scaling.factor"))}
        elif kind == "yarn" and attention_factor is None:
            rope |= {"rope_type": "yarn", "factor": float(self._key("rope.scaling.factor"))}
            rope["original_max_position_embeddings"] = self._original_context()
        elif kind == "longrope":
            rope |= {"rope_type": "longrope", "attention_factor": attention_factor}
            rope["original_max_position_embeddings"] = self._original_context()
        elif kind != "none":
            raise ModelLoadError(
                f"{self.file} has rope scaling of type {kind!r} (attn_factor {attention_factor}); "
                "allowed are none, linear, yarn without attn_factor, longrope"
            )
        if ROPE_FREQS in self._raw:
            rope |= self._llama3_scaling(theta)
        if kind == "longrope":
            for key, name in ROPE_FACTORS.items():
                raw = self._raw.get(name)
                if raw is None:
                    raise ModelLoadError(f"{self.file} has longrope scaling but no tensor {name}")
                rope[key] = [float(x) for x in self._dequantise(raw, raw.data)]
        return rope

    def _llama3_scaling(self, theta: float) -> dict[str, Any]:
        """The scaling of Llama 3.1 whose factors the file keeps, one for each pair."""
        raw = self._raw[ROPE_FREQS]
        stored = self._dequantise(raw, raw.data).reshape(-1)
        factor = float(stored.max())
        if factor == 1.0:
            return {}
        num_pairs = len(stored)
        inv_freq = theta ** (-np.arange(num_pairs) / num_pairs)
        turns = LLAMA3_CONTEXT * inv_freq / (2 * math.pi)
        kept = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clip(0.0, 1.0)
        if not np.allclose(stored, 1.0 / (kept + (1.0 - kept) / factor), rtol=1e-3):
            raise ModelLoadError(
                f"{self.file} has a tensor {ROPE_FREQS} that is not the scaling of Llama 3.1; "
                "use the model's safetensors"
            )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": LLAMA3_LOW,
            "high_freq_factor": LLAMA3_HIGH,
            "original_max_position_embeddings": LLAMA3_CONTEXT,
        }

    def _dequantise(self, raw: Any, data: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """The values of `data`: all of the tensor `raw`, or some of its rows."""
        self.num_bytes_read += data.nbytes
        try:
            return np.asarray(gguf.quants.dequantize(data, raw.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"tensor {raw.name} in {self.file} has type {raw.tensor_type.name}, which cannot "
                "be dequantised; use F32, F16, BF16, Q8_0, Q4_1, Q4_K and the like"
            ) from error
        except ValueError as error:
            raise ModelLoadError(f"tensor {raw.name} in {self.file} is damaged: {error}") from error

    def _metadata(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _key(self, key: str, *default: Any) -> Any:
        """Metadata of the file's architecture."""
        value = self._metadata(f"{self.architecture}.{key}")
        if value is not None:
            return value
        if not default:
            raise ModelLoadError(f"{self.file} has no metadata {self.architecture}.{key}")
        return default[0]

    def _count(self, key: str) -> int:
        value = self._key(key)
        if not isinstance(value, int):
            raise ModelLoadError(
                f"{self.file} has {self.architecture}.{key}={value!r}; allowed is one number for "
                "all layers"
            )
        return value

    def _num_kv_heads(self) -> int:
        key = "attention.head_count_kv"
        return self._count(key if self._key(key, None) is not None else "attention.head_count")

    def _original_context(self) -> int:
        return int(self._key("rope.scaling.original_context_length", self._count("context_length")))

    def _token_id(self, key: str) -> int | None:
        value = self._metadata(f"tokenizer.ggml.{key}")
        return None if value is None else int(value)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; names that are not known stay as they are."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def _split_halves(values: "np.ndarray[Any, Any]", num_heads: int) -> "np.ndarray[Any, Any]":
    """Rows of each head from (pair, part) order, as llama.cpp rotates, to (part, pair) order."""
    head_dim = len(values) // num_heads
    grouped = values.reshape(num_heads, head_dim // 2, 2, *values.shape[1:])
    return np.swapaxes(grouped, 1, 2).reshape(values.shape)
