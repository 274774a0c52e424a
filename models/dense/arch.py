"""Shape of a dense decoder, read from the keys of a Hugging Face config.json. Torch-free.

Knows the key names and default values of Llama, Mistral, Qwen2 and Qwen3; knows no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from inferkit.core.cache_spec import DTYPE_BYTES
from inferkit.core.decoder_keys import (
    DECODER_KEYS,
    FULL,
    SLIDING,
    check_kv_heads,
    check_quantization,
    read_architecture,
    read_even,
    read_layer_types,
    read_window,
    windows_of,
)
from inferkit.core.hf_config import ConfigReader, check_same_meaning
from inferkit.core.parallel_layout import HeadLayout, ParallelLayout, local_size
from inferkit.layers.rope_config import DEFAULT_THETA, ROPE_KEYS, RopeScaling, read_rope


@dataclass(frozen=True, kw_only=True)
class DenseArch:
    """What the layers of a dense decoder need to know."""

    architecture: str
    """The Hugging Face class name, for instance LlamaForCausalLM."""
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    """Biases on q, k and v."""
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each head of q and k, before the rotation."""
    hidden_act: str
    rope_theta: float
    rope_scaling: RopeScaling | None
    layer_windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens, the query's own included; None = full attention."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def max_context_len(self) -> int:
        """Longest request in tokens: the trained positions, stretched by the rope scaling."""
        scaling, positions = self.rope_scaling, self.max_position_embeddings
        if scaling is None:
            return positions
        if scaling.rope_type == "yarn":
            return max(positions, int(scaling.original_max_position_embeddings * scaling.factor))
        if scaling.rope_type in ("linear", "dynamic"):
            return int(positions * scaling.factor)
        return positions

    def keys_depend_on_prompt_len(self, max_model_len: int) -> bool:
        """Whether equal prefixes of prompts of different lengths can have different keys."""
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type not in ("dynamic", "longrope"):
            return False
        is_dynamic = scaling.rope_type == "dynamic"
        trained = (
            self.max_position_embeddings if is_dynamic else scaling.original_max_position_embeddings
        )
        return max_model_len > trained

    @property
    def num_parameters(self) -> int:
        """Weights of the checkpoint; a tied head counts once."""
        return self.num_parameters_of_rank(ParallelLayout())

    def num_parameters_of_rank(self, layout: ParallelLayout) -> int:
        """Weights that one rank holds, padding included; equal on all ranks."""
        return sum(self.parameter_parts_of_rank(layout).values())

    def parameter_parts_of_rank(self, layout: ParallelLayout) -> dict[str, int]:
        """The same, by part of the model; a tied head that is no copy counts with the embedding."""
        hidden = self.hidden_size
        parts = {
            "attention": self.num_hidden_layers * self._attention_of_rank(layout),
            self.mlp_part: self._mlps_of_rank(layout),
            "norms": self._norms,
            "embedding": hidden * local_size(self.vocab_size, layout.embed_tp_size),
        }
        if not self.tie_word_embeddings or layout.embed_tp_size != layout.lmhead_tp_size:
            parts["head"] = hidden * local_size(self.vocab_size, layout.lmhead_tp_size)
        return parts

    def kv_bytes_per_token(self, dtype: str) -> int:
        """KV cache of one token over all layers, in bytes, for "float32" and the like."""
        return self.kv_bytes_per_token_of_rank(dtype, ParallelLayout())

    def kv_bytes_per_token_of_rank(self, dtype: str, layout: ParallelLayout) -> int:
        """KV cache of one token on one rank over all layers, padded heads included, in bytes."""
        kv_size = self.heads(layout).num_local_kv_heads * self.head_dim
        return self.num_hidden_layers * 2 * kv_size * DTYPE_BYTES[dtype]

    def heads(self, layout: ParallelLayout) -> HeadLayout:
        return HeadLayout(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            tp_size=layout.attn_tp_size,
        )

    mlp_part: ClassVar[str] = "MLPs"
    """What `_mlps_of_rank` counts."""

    @property
    def _norms(self) -> int:
        """Weights of all norms, those of single heads left out."""
        return (2 * self.num_hidden_layers + 1) * self.hidden_size

    def _attention_of_rank(self, layout: ParallelLayout) -> int:
        """Weights of the attention of one layer."""
        heads, hidden = self.heads(layout), self.hidden_size
        qkv = (heads.num_local_heads + 2 * heads.num_local_kv_heads) * self.head_dim
        out = heads.num_local_heads * self.head_dim
        out *= max(1, layout.attn_tp_size // layout.o_proj_tp_size)
        total = hidden * (qkv + local_size(out, layout.dp_span("o_proj")))
        total += self.attention_bias * qkv + self.attention_output_bias * hidden
        return total + self.qk_norm * 2 * self.head_dim

    def _mlps_of_rank(self, layout: ParallelLayout) -> int:
        """Weights of the feed-forward networks of all layers."""
        hidden, inner = self.hidden_size, local_size(self.intermediate_size, layout.dense_tp_size)
        return self.num_hidden_layers * (3 * hidden * inner + self.mlp_bias * (2 * inner + hidden))


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a config.json of an architecture leaves unsaid, as transformers has it."""

    model_type: str
    head_dim: int | None = None
    """None = hidden_size / num_attention_heads."""
    num_key_value_heads: int | None = None
    """Where the key is absent; null in the file means num_attention_heads in every family."""
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = DEFAULT_THETA
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    attention_bias: bool = False
    fixed_qkv_bias: bool | None = None
    """None = the key attention_bias decides, over q, k, v and o."""
    has_mlp_bias: bool = False
    qk_norm: bool = False
    has_window: bool = False
    """Whether `sliding_window` is read; it is of all layers, unless there are layer types."""
    window: int | None = 4096
    """Where the key is absent."""
    has_window_switch: bool = False
    """Whether `use_sliding_window` must be true for it."""
    has_layer_types: bool = False
    quant_method: str | None = None
    """Of quantised weights that can be read."""


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_ids=(2,),
        has_mlp_bias=True,
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        bos_token_id=1,
        eos_token_ids=(2,),
        fixed_qkv_bias=False,
        has_window=True,
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        num_key_value_heads=32,
        max_position_embeddings=32768,
        fixed_qkv_bias=True,
        has_window=True,
        has_window_switch=True,
        has_layer_types=True,
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        head_dim=128,
        num_key_value_heads=32,
        max_position_embeddings=32768,
        qk_norm=True,
        has_window=True,
        has_window_switch=True,
        has_layer_types=True,
    ),
}


def keys_of(family: Family) -> frozenset[str]:
    """Keys that `read_fields` reads, and those without a meaning."""
    keys = DECODER_KEYS | ROPE_KEYS | {"hidden_act"}
    if family.fixed_qkv_bias is None:
        keys |= {"attention_bias"}
    if family.has_mlp_bias:
        keys |= {"mlp_bias"}
    if family.has_window:
        keys |= {"sliding_window"}
    if family.has_window_switch:
        keys |= {"use_sliding_window"}
    return keys | {"max_window_layers", "layer_types"} if family.has_layer_types else keys


def known_keys(architecture: str) -> frozenset[str]:
    """Keys that a user may write in `model.arch` for this architecture."""
    return keys_of(FAMILIES[architecture])


def parse_arch(
    config: Mapping[str, Any], *, origin: str | None = None, architecture: str | None = None
) -> DenseArch:
    """Read the keys of a config.json, or of the `model.arch` that a user wrote.

    Args:
        origin: the file, named in messages (None = that of a ConfigFile, else `model.arch`, where
            unknown keys are faults too).
        architecture: taken where the keys name none.

    Raises:
        ConfigError: one line for each key that is missing, faulty, unknown or contradictory.
    """
    reader = ConfigReader.of(config, origin)
    model_types = {name: family.model_type for name, family in FAMILIES.items()}
    name = read_architecture(reader, model_types, architecture)
    if reader.is_user_written:
        reader.check_known(known_keys(name))
    arch = DenseArch(architecture=name, **read_fields(reader, FAMILIES[name]))
    reader.raise_faults()
    return arch


def check_user_arch(
    user_arch: Mapping[str, Any], config: Mapping[str, Any], *, origin: str
) -> None:
    """Refuse keys of `model.arch` that say something else than the config.json at `origin`."""
    known = known_keys(parse_arch(config, origin=origin).architecture)
    check_same_meaning(user_arch, config, origin=origin, parse_arch=parse_arch, known=known)


def read_fields(reader: ConfigReader, family: Family) -> dict[str, Any]:
    """All fields of a DenseArch but `architecture`; faults go to the reader.

    For families with more keys too, which change or add fields.
    """
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_layers = reader.integer("num_hidden_layers")
    head_dim = _head_dim(reader, family, hidden_size, num_heads)
    max_position_embeddings = reader.integer(
        "max_position_embeddings", family.max_position_embeddings
    )
    theta, scaling = read_rope(
        reader,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        default_theta=family.rope_theta,
    )
    if reader.config.get("hidden_act", "silu") != "silu":
        reader.fault("hidden_act", "allowed is silu")
    check_quantization(reader, family.quant_method)
    bias, has_fixed_bias = family.fixed_qkv_bias, family.fixed_qkv_bias is not None
    if bias is None:
        bias = reader.boolean("attention_bias", family.attention_bias)
    bos_token_ids = () if family.bos_token_id is None else (family.bos_token_id,)
    return {
        "model_type": family.model_type,
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer("intermediate_size"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(reader, family, num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": reader.number("rms_norm_eps", family.rms_norm_eps, above=0.0),
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": reader.boolean("tie_word_embeddings", False),
        "attention_bias": bias,
        "attention_output_bias": bias and not has_fixed_bias,
        "mlp_bias": family.has_mlp_bias and reader.boolean("mlp_bias", False),
        "qk_norm": family.qk_norm,
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "layer_windows": _layer_windows(reader, family, num_layers),
        "bos_token_id": next(iter(reader.token_ids("bos_token_id", bos_token_ids)), None),
        "eos_token_ids": reader.token_ids("eos_token_id", family.eos_token_ids),
    }


def _head_dim(reader: ConfigReader, family: Family, hidden_size: int, num_heads: int) -> int:
    if reader.has("head_dim") or family.head_dim is not None:
        return read_even(reader, "head_dim", family.head_dim)
    given = (reader.config.get("hidden_size"), reader.config.get("num_attention_heads"))
    if given != (hidden_size, num_heads):
        return 2  # they are at fault already
    if hidden_size % num_heads:
        problem = f"must divide hidden_size={hidden_size}, or give head_dim"
        reader.fault("num_attention_heads", problem)
        return 2
    return read_even(reader, "head_dim", hidden_size // num_heads)


def _num_kv_heads(reader: ConfigReader, family: Family, num_heads: int) -> int:
    is_absent = "num_key_value_heads" not in reader.config
    default = family.num_key_value_heads if is_absent else None
    num_kv_heads = reader.integer("num_key_value_heads", default or num_heads)
    check_kv_heads(reader, num_heads, num_kv_heads)
    return num_kv_heads


def _layer_windows(reader: ConfigReader, family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = None
    if family.has_window and not (
        family.has_window_switch and not reader.boolean("use_sliding_window", False)
    ):
        window = read_window(reader, family.window)
    if not family.has_layer_types:
        return (window,) * num_layers
    first = reader.integer("max_window_layers", 28, minimum=0)
    by_position = [FULL if idx < first else SLIDING for idx in range(num_layers)]
    layer_types = read_layer_types(reader, num_layers, by_position)
    if window is None and reader.has("layer_types") and SLIDING in layer_types:
        reader.fault("layer_types", f"{SLIDING} needs use_sliding_window=true and sliding_window")
    return windows_of(layer_types, window)
