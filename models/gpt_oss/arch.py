"""Shape of a gpt-oss model, read from the keys of a Hugging Face config.json. Torch-free.

Knows the key names and default values of GptOssForCausalLM; knows no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferkit.core.errors import ConfigError
from inferkit.core.hf_config import USER_ARCH, ConfigFile, ConfigReader
from inferkit.core.parallel_layout import ParallelLayout, local_size
from inferkit.layers.rope_config import ROPE_KEYS, read_rope
from inferkit.models.dense.arch import FULL, SLIDING
from inferkit.models.moe.arch import MoEArch

ARCHITECTURE = "GptOssForCausalLM"
MODEL_TYPE = "gpt_oss"
QUANT_METHOD = "mxfp4"
"""The only quantisation of published checkpoints; experts are dequantised as they are read."""

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
        "attention_bias",
        "sliding_window",
        "layer_types",
        "num_local_experts",
        "num_experts_per_tok",
        "swiglu_alpha",
        "swiglu_limit",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "hidden_act",
        "bos_token_id",
        "eos_token_id",
        "quantization_config",
    }
)
# Found in published files, without a meaning for inference here (some repeat a key above).
_BOOKKEEPING_KEYS = frozenset(
    {
        "attention_dropout",
        "dtype",
        "experts_per_token",
        "initial_context_length",
        "initializer_range",
        "output_router_logits",
        "pad_token_id",
        "router_aux_loss_coef",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
KNOWN_KEYS = _SHAPE_KEYS | _BOOKKEEPING_KEYS | ROPE_KEYS
"""Keys that a user may write in `model.arch`."""

_DEFAULT_THETA = 150_000.0
_DEFAULT_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class GptOssArch(MoEArch):
    """What the layers of gpt-oss need to know; `intermediate_size` is that of one expert."""

    swiglu_alpha: float
    """Factor of the gate inside its sigmoid."""
    swiglu_limit: float
    """The gate is cut above it, the other half on both sides."""

    def _attention_of_rank(self, layout: ParallelLayout) -> int:
        num_sinks = self.heads(layout).num_local_heads
        return super()._attention_of_rank(layout) + num_sinks

    def _mlps_of_rank(self, layout: ParallelLayout) -> int:
        inner = local_size(self.moe_intermediate_size, layout.moe_tp_size)
        biases = self.num_experts // layout.moe_ep_size * (2 * inner + self.hidden_size)
        biases += self.num_experts  # of the router
        return super()._mlps_of_rank(layout) + self.num_hidden_layers * biases


def parse_arch(
    config: Mapping[str, Any], *, origin: str | None = None, architecture: str | None = None
) -> GptOssArch:
    """Read the keys of a config.json, or of the `model.arch` that a user wrote.

    Args:
        origin: the file, named in messages (None = that of a ConfigFile, else `model.arch`, where
            unknown keys are faults too).
        architecture: the chosen class; there is but one.

    Raises:
        ConfigError: one line for each key that is missing, faulty, unknown or contradictory.
    """
    if origin is None:
        origin = config.origin if isinstance(config, ConfigFile) else USER_ARCH
    reader = ConfigReader(_with_rope(config), origin)
    _check_name(reader)
    if reader.is_user_written:
        reader.check_known(KNOWN_KEYS)
    arch = _read(reader)
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
    reader.check_known(KNOWN_KEYS)
    for key in user_arch:
        if key in _BOOKKEEPING_KEYS or key not in KNOWN_KEYS:
            continue
        try:
            merged = parse_arch({**config, key: user_arch[key]}, origin=origin)
        except ConfigError:
            merged = None
        if merged != in_file:
            reader.fault(key, f"{origin} has {config.get(key)!r}; the file decides, drop the key")
    reader.raise_faults()


def _with_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys with this family's rotary settings where there are none."""
    if config.get("rope_parameters") or config.get("rope_scaling"):
        return config
    return {**config, "rope_parameters": _DEFAULT_ROPE, "rope_scaling": None}


def _check_name(reader: ConfigReader) -> None:
    named = reader.config.get("architectures")
    if named and (not isinstance(named, list | tuple) or ARCHITECTURE not in named):
        reader.fault("architectures", f"allowed is [{ARCHITECTURE}]")
    if reader.config.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        reader.fault("model_type", f"allowed is {MODEL_TYPE}")


def _read(reader: ConfigReader) -> GptOssArch:
    num_layers = reader.integer("num_hidden_layers")
    num_heads = reader.integer("num_attention_heads")
    head_dim = reader.integer("head_dim", 64)
    if head_dim % 2:
        reader.fault("head_dim", f"rotary embeddings need an even head size, this is {head_dim}")
        head_dim += 1
    max_positions = reader.integer("max_position_embeddings", 131072)
    theta, scaling = read_rope(
        reader,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        default_theta=_DEFAULT_THETA,
    )
    if reader.config.get("hidden_act", "silu") != "silu":
        reader.fault("hidden_act", "allowed is silu")
    _check_quantization(reader)
    num_experts, num_chosen = _experts(reader)
    intermediate_size = reader.integer("intermediate_size")
    has_bias = reader.boolean("attention_bias", True)
    return GptOssArch(
        architecture=ARCHITECTURE,
        model_type=MODEL_TYPE,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=_num_kv_heads(reader, num_heads),
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-5, above=0.0),
        max_position_embeddings=max_positions,
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=True,
        qk_norm=False,
        hidden_act="silu",
        rope_theta=theta,
        rope_scaling=scaling,
        layer_windows=_layer_windows(reader, num_layers),
        bos_token_id=next(iter(reader.token_ids("bos_token_id", ())), None),
        eos_token_ids=reader.token_ids("eos_token_id", ()),
        num_experts=num_experts,
        num_experts_per_tok=num_chosen,
        moe_intermediate_size=intermediate_size,
        norm_topk_prob=True,
        moe_layers=tuple(range(num_layers)),
        swiglu_alpha=reader.number("swiglu_alpha", 1.702),
        swiglu_limit=reader.number("swiglu_limit", 7.0, above=0.0),
    )


def _num_kv_heads(reader: ConfigReader, num_heads: int) -> int:
    num_kv_heads = reader.integer("num_key_value_heads", 8)
    if num_heads % num_kv_heads and reader.has("num_attention_heads"):
        reader.fault(
            "num_key_value_heads",
            f"num_attention_heads={num_heads} must be a multiple of it ({num_kv_heads} is used)",
        )
    return num_kv_heads


def _experts(reader: ConfigReader) -> tuple[int, int]:
    """(experts of a layer, experts of a token)."""
    num_experts = reader.integer("num_local_experts")
    num_chosen = reader.integer("num_experts_per_tok", 4)
    if num_chosen > num_experts and reader.has("num_local_experts"):
        reader.fault("num_experts_per_tok", f"allowed is at most num_local_experts={num_experts}")
    return num_experts, num_chosen


def _layer_windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Absent layer types alternate, the first with a window of 128 tokens."""
    window = None
    if reader.has("sliding_window") or "sliding_window" not in reader.config:
        window = reader.integer("sliding_window", 128)
    layer_types = reader.config.get("layer_types")
    if layer_types is None:
        layer_types = [FULL if idx % 2 else SLIDING for idx in range(num_layers)]
    if not isinstance(layer_types, list | tuple) or any(
        kind not in (FULL, SLIDING) for kind in layer_types
    ):
        reader.fault("layer_types", f"allowed is a list of {FULL} and {SLIDING}")
    elif len(layer_types) != num_layers:
        reader.fault("layer_types", f"must have one entry for each of {num_layers} layers")
    elif window is None and SLIDING in layer_types:
        reader.fault("sliding_window", f"layers of type {SLIDING} need a window in tokens")
    else:
        return tuple(window if kind == SLIDING else None for kind in layer_types)
    return (None,) * num_layers


def _check_quantization(reader: ConfigReader) -> None:
    if not reader.config.get("quantization_config"):
        return
    method = reader.nested("quantization_config").config.get("quant_method")
    if method != QUANT_METHOD:
        reader.fault(
            "quantization_config",
            f"allowed is quant_method {QUANT_METHOD}, or unquantised weights: bfloat16, float16, "
            "float32",
        )
