"""Shape of a dense decoder, read from the keys of a Hugging Face config.json. Torch-free.

Knows the key names and default values of Llama, Mistral, Qwen2 and Qwen3; knows no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferkit.core.cache_spec import DTYPE_BYTES
from inferkit.core.errors import ConfigError
from inferkit.core.hf_config import USER_ARCH, ConfigFile, ConfigReader
from inferkit.core.parallel_layout import HeadLayout, ParallelLayout, local_size
from inferkit.layers.rope_config import ROPE_KEYS, RopeScaling, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"


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
        hidden = self.hidden_size
        total = self.num_hidden_layers * (self._attention_of_rank(layout) + 2 * hidden) + hidden
        total += self._mlps_of_rank(layout)
        total += hidden * local_size(self.vocab_size, layout.embed_tp_size)
        if not self.tie_word_embeddings or layout.embed_tp_size != layout.lmhead_tp_size:
            total += hidden * local_size(self.vocab_size, layout.lmhead_tp_size)
        return total

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
class _Family:
    """What a config.json of this architecture leaves unsaid."""

    model_type: str
    head_dim: int | None = None
    """None = hidden_size / num_attention_heads."""
    num_key_value_heads: int | None = None
    """Where the key is absent; null in the file means num_attention_heads in every family."""
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    fixed_qkv_bias: bool | None = None
    """None = the key attention_bias decides, over q, k, v and o."""
    has_mlp_bias: bool = False
    qk_norm: bool = False
    has_window: bool = False
    has_layer_types: bool = False


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(
        model_type="llama",
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_ids=(2,),
        has_mlp_bias=True,
    ),
    "MistralForCausalLM": _Family(
        model_type="mistral",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        bos_token_id=1,
        eos_token_ids=(2,),
        fixed_qkv_bias=False,
        has_window=True,
    ),
    "Qwen2ForCausalLM": _Family(
        model_type="qwen2",
        num_key_value_heads=32,
        max_position_embeddings=32768,
        fixed_qkv_bias=True,
        has_window=True,
        has_layer_types=True,
    ),
    "Qwen3ForCausalLM": _Family(
        model_type="qwen3",
        head_dim=128,
        num_key_value_heads=32,
        max_position_embeddings=32768,
        qk_norm=True,
        has_window=True,
        has_layer_types=True,
    ),
}

_SHAPE_KEYS = frozenset(
    {
        "architectures",
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "hidden_act",
        "bos_token_id",
        "eos_token_id",
        "quantization_config",
    }
)
# Written by transformers into every config.json, without a meaning for inference here.
_BOOKKEEPING_KEYS = frozenset(
    {
        "attention_dropout",
        "dtype",
        "initializer_range",
        "pad_token_id",
        "pretraining_tp",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_LAYER_TYPE_KEYS = frozenset({"use_sliding_window", "max_window_layers", "layer_types"})


def known_keys(architecture: str) -> frozenset[str]:
    """Keys that a user may write in `model.arch` for this architecture."""
    family = FAMILIES[architecture]
    keys = _SHAPE_KEYS | _BOOKKEEPING_KEYS | ROPE_KEYS
    if family.fixed_qkv_bias is None:
        keys |= {"attention_bias"}
    if family.has_mlp_bias:
        keys |= {"mlp_bias"}
    if family.has_window:
        keys |= {"sliding_window"}
    return keys | _LAYER_TYPE_KEYS if family.has_layer_types else keys


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
    if origin is None:
        origin = config.origin if isinstance(config, ConfigFile) else USER_ARCH
    reader = ConfigReader(config, origin)
    name = _architecture(reader, architecture)
    family = FAMILIES[name]
    if reader.is_user_written:
        reader.check_known(known_keys(name))
    arch = _read(reader, name, family)
    reader.raise_faults()
    return arch


def check_user_arch(
    user_arch: Mapping[str, Any], config: Mapping[str, Any], *, origin: str
) -> None:
    """Keys of `model.arch` beside a config.json at `origin` must mean what the file means.

    Raises:
        ConfigError: a line for each key that is unknown or differs.
    """
    in_file = parse_arch(config, origin=origin)
    reader = ConfigReader(user_arch)
    reader.check_known(known_keys(in_file.architecture))
    for key in user_arch:
        if key in _BOOKKEEPING_KEYS or key not in known_keys(in_file.architecture):
            continue
        try:
            merged = parse_arch({**config, key: user_arch[key]}, origin=origin)
        except ConfigError:
            merged = None
        if merged != in_file:
            reader.fault(key, f"{origin} has {config.get(key)!r}; the file decides, drop the key")
    reader.raise_faults()


def _architecture(reader: ConfigReader, fallback: str | None) -> str:
    """The architecture's name; raises at once, since all else depends on it."""
    allowed = f"allowed are {', '.join(FAMILIES)}"
    named = reader.config.get("architectures")
    model_type = reader.config.get("model_type")
    if isinstance(named, list | tuple) and named:
        for name in named:
            if name in FAMILIES:
                return str(name)
        reader.fault("architectures", allowed)
    elif named:
        reader.fault("architectures", f"give a list of one name; {allowed}")
    elif fallback is not None:
        return fallback
    elif model_type is not None:
        for name, family in FAMILIES.items():
            if family.model_type == model_type:
                return name
        types = ", ".join(family.model_type for family in FAMILIES.values())
        reader.fault("model_type", f"allowed are {types}")
    else:
        reader.missing("architectures", allowed)
    reader.raise_faults()
    raise AssertionError("a fault was noted above")


def _read(reader: ConfigReader, name: str, family: _Family) -> DenseArch:
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_layers = reader.integer("num_hidden_layers")
    head_dim = _head_dim(reader, family, hidden_size, num_heads)
    max_position_embeddings = reader.integer(
        "max_position_embeddings", family.max_position_embeddings
    )
    theta, scaling = read_rope(
        reader, head_dim=head_dim, max_position_embeddings=max_position_embeddings
    )
    if reader.config.get("hidden_act", "silu") != "silu":
        reader.fault("hidden_act", "allowed is silu")
    if reader.config.get("quantization_config"):
        allowed = "allowed are unquantised weights: bfloat16, float16, float32"
        reader.fault("quantization_config", allowed)
    attention_bias = reader.boolean("attention_bias", False)
    fixed_bias = family.fixed_qkv_bias
    return DenseArch(
        architecture=name,
        model_type=family.model_type,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=_num_kv_heads(reader, family, num_heads),
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6, above=0.0),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        attention_bias=attention_bias if fixed_bias is None else fixed_bias,
        attention_output_bias=attention_bias if fixed_bias is None else False,
        mlp_bias=family.has_mlp_bias and reader.boolean("mlp_bias", False),
        qk_norm=family.qk_norm,
        hidden_act="silu",
        rope_theta=theta,
        rope_scaling=scaling,
        layer_windows=_layer_windows(reader, family, num_layers),
        bos_token_id=next(iter(reader.token_ids("bos_token_id", _ids(family.bos_token_id))), None),
        eos_token_ids=reader.token_ids("eos_token_id", family.eos_token_ids),
    )


def _ids(token_id: int | None) -> tuple[int, ...]:
    return () if token_id is None else (token_id,)


def _head_dim(reader: ConfigReader, family: _Family, hidden_size: int, num_heads: int) -> int:
    if not reader.has("head_dim") and family.head_dim is None:
        if hidden_size % num_heads and reader.has("hidden_size"):
            reader.fault(
                "num_attention_heads", f"must divide hidden_size={hidden_size}, or give head_dim"
            )
            return 2
        head_dim = hidden_size // num_heads
    else:
        head_dim = reader.integer("head_dim", family.head_dim)
    if head_dim % 2 and not reader.faults:
        reader.fault("head_dim", f"rotary embeddings need an even head size, this is {head_dim}")
    return head_dim


def _num_kv_heads(reader: ConfigReader, family: _Family, num_heads: int) -> int:
    if "num_key_value_heads" not in reader.config and family.num_key_value_heads is not None:
        num_kv_heads = family.num_key_value_heads
    else:
        num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads and reader.has("num_attention_heads"):
        reader.fault(
            "num_key_value_heads",
            f"num_attention_heads={num_heads} must be a multiple of it ({num_kv_heads} is used)",
        )
    return num_kv_heads


def _layer_windows(
    reader: ConfigReader, family: _Family, num_layers: int
) -> tuple[int | None, ...]:
    window = _window(reader, family)
    if not family.has_layer_types:
        return (window,) * num_layers
    first = reader.integer("max_window_layers", 28, minimum=0)
    layer_types = reader.config.get("layer_types")
    if layer_types is None:
        return tuple(window if idx >= first else None for idx in range(num_layers))
    if not isinstance(layer_types, list | tuple) or any(
        kind not in (FULL, SLIDING) for kind in layer_types
    ):
        reader.fault("layer_types", f"allowed is a list of {FULL} and {SLIDING}")
    elif len(layer_types) != num_layers:
        reader.fault("layer_types", f"must have one entry for each of {num_layers} layers")
    elif window is None and SLIDING in layer_types:
        reader.fault("layer_types", f"{SLIDING} needs use_sliding_window=true and sliding_window")
    else:
        return tuple(window if kind == SLIDING else None for kind in layer_types)
    return (None,) * num_layers


def _window(reader: ConfigReader, family: _Family) -> int | None:
    """The window where the configuration switches it on; an explicit null means none."""
    if not family.has_window:
        return None
    if family.has_layer_types and not reader.boolean("use_sliding_window", False):
        return None
    if "sliding_window" in reader.config:
        return reader.optional_integer("sliding_window", minimum=1)
    return 4096
