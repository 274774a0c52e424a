"""Shape of a Gemma-3 text decoder, read from the keys of a Hugging Face config.json. Torch-free.

Knows the key names and default values of Gemma3ForCausalLM; knows no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferkit.core.errors import ConfigError
from inferkit.core.hf_config import USER_ARCH, ConfigFile, ConfigReader
from inferkit.core.parallel_layout import ParallelLayout
from inferkit.layers.rope_config import ROPE_KEYS, RopeScaling, read_rope, read_rope_scaling
from inferkit.models.dense.arch import FULL, SLIDING, DenseArch

ARCHITECTURE = "Gemma3ForCausalLM"
MODEL_TYPE = "gemma3_text"
ACTIVATION = "gelu_pytorch_tanh"
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not depend on a length."""
DEFAULT_THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}

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
        "query_pre_attn_scalar",
        "attention_bias",
        "sliding_window",
        "layer_types",
        "sliding_window_pattern",
        "rope_local_base_freq",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "hidden_activation",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
        "quantization_config",
        "bos_token_id",
        "eos_token_id",
    }
)
# Written by transformers into every config.json, without a meaning for inference here.
_BOOKKEEPING_KEYS = frozenset(
    {
        "_sliding_window_pattern",
        "attention_dropout",
        "cache_implementation",
        "dtype",
        "initializer_range",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
KNOWN_KEYS = _SHAPE_KEYS | _BOOKKEEPING_KEYS | ROPE_KEYS
"""Keys that a user may write in `model.arch`."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary settings of the layers of one type; scaling None = default."""

    theta: float
    scaling: RopeScaling | None


@dataclass(frozen=True, kw_only=True)
class Gemma3Arch(DenseArch):
    """A dense decoder with two more norms in each layer, and rotary angles by type of layer.

    `rope_theta` and `rope_scaling` are those of full attention, as in `ropes`.
    """

    layer_types: tuple[str, ...]
    ropes: Mapping[str, Rope]
    """By type of layer."""
    query_pre_attn_scalar: float
    """Products of queries and keys are divided by its square root."""

    @property
    def max_context_len(self) -> int:
        """Longest request in tokens; the positions include what a rope scaling adds."""
        return self.max_position_embeddings

    def num_parameters_of_rank(self, layout: ParallelLayout) -> int:
        """Weights that one rank holds, padding included; equal on all ranks."""
        norms = self.num_hidden_layers * 2 * self.hidden_size
        return super().num_parameters_of_rank(layout) + norms


def parse_arch(
    config: Mapping[str, Any], *, origin: str | None = None, architecture: str | None = None
) -> Gemma3Arch:
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
    reader = ConfigReader(config, origin)
    _check_name(reader)
    if reader.is_user_written:
        reader.check_known(KNOWN_KEYS)
    _check_unsupported(reader)
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
    for key in (KNOWN_KEYS - _BOOKKEEPING_KEYS).intersection(user_arch):
        try:
            merged = parse_arch({**config, key: user_arch[key]}, origin=origin)
        except ConfigError:
            merged = None
        if merged != in_file:
            reader.fault(key, f"{origin} has {config.get(key)!r}; the file decides, drop the key")
    reader.raise_faults()


def _check_name(reader: ConfigReader) -> None:
    """Another family's keys are read no further."""
    named = reader.config.get("architectures")
    if named and (not isinstance(named, list | tuple) or ARCHITECTURE not in named):
        reader.fault("architectures", f"allowed is [{ARCHITECTURE}]")
    if reader.config.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        reader.fault("model_type", f"allowed is {MODEL_TYPE} (the text model)")
    reader.raise_faults()


def _check_unsupported(reader: ConfigReader) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if reader.has(key):
            reader.fault(key, "soft caps are not supported (Gemma-3 has none); allowed is null")
    if reader.boolean("use_bidirectional_attention", False):
        reader.fault("use_bidirectional_attention", "allowed is false: a decoder is causal")
    if reader.config.get("hidden_activation", ACTIVATION) != ACTIVATION:
        reader.fault("hidden_activation", f"allowed is {ACTIVATION}")
    if reader.config.get("quantization_config"):
        allowed = "allowed are unquantised weights: bfloat16, float16, float32"
        reader.fault("quantization_config", allowed)


def _read(reader: ConfigReader) -> Gemma3Arch:
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", 4)
    if num_heads % num_kv_heads and reader.has("num_attention_heads"):
        problem = f"num_attention_heads={num_heads} must be a multiple of it ({num_kv_heads})"
        reader.fault("num_key_value_heads", problem)
    head_dim = reader.integer("head_dim", 256)
    if head_dim % 2:
        reader.fault("head_dim", "rotary embeddings need an even head size")
    positions = reader.integer("max_position_embeddings", 131_072)
    layer_types = _layer_types(reader, reader.integer("num_hidden_layers"))
    if reader.config.get("sliding_window", 1) is None and SLIDING in layer_types:
        reader.fault("sliding_window", "layers of sliding_attention need an integer >= 1")
    ropes = _ropes(reader, head_dim, positions)
    window = reader.integer("sliding_window", 4096)
    bias = reader.boolean("attention_bias", False)
    return Gemma3Arch(
        architecture=ARCHITECTURE,
        model_type=MODEL_TYPE,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_hidden_layers=len(layer_types),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6, above=0.0),
        max_position_embeddings=positions,
        tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=False,
        qk_norm=True,
        hidden_act=ACTIVATION,
        rope_theta=ropes[FULL].theta,
        rope_scaling=ropes[FULL].scaling,
        layer_windows=tuple(window if kind == SLIDING else None for kind in layer_types),
        layer_types=layer_types,
        ropes=ropes,
        query_pre_attn_scalar=reader.number("query_pre_attn_scalar", 256.0, above=0.0),
        bos_token_id=next(iter(reader.token_ids("bos_token_id", (2,))), None),
        eos_token_ids=reader.token_ids("eos_token_id", (1,)),
    )


def _layer_types(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Given, or full attention in every n-th layer."""
    given = reader.config.get("layer_types")
    if given is None:
        period = reader.integer("sliding_window_pattern", 6)
        return tuple(FULL if (idx + 1) % period == 0 else SLIDING for idx in range(num_layers))
    if not isinstance(given, list | tuple) or any(kind not in (FULL, SLIDING) for kind in given):
        reader.fault("layer_types", f"allowed is a list of {FULL} and {SLIDING}")
    elif len(given) != num_layers:
        reader.fault("layer_types", f"must have one entry for each of {num_layers} layers")
    else:
        return tuple(given)
    return (FULL,) * num_layers


def _ropes(reader: ConfigReader, head_dim: int, positions: int) -> dict[str, Rope]:
    """Older files have keys for each type at the top, newer ones a dictionary for each type."""
    local_theta = reader.number("rope_local_base_freq", DEFAULT_THETAS[SLIDING], above=1.0)
    sizes = {"head_dim": head_dim, "max_position_embeddings": positions}
    if not reader.config.get("rope_parameters"):
        theta, scaling = read_rope(reader, **sizes, default_theta=DEFAULT_THETAS[FULL])
        ropes = {
            FULL: Rope(theta=theta, scaling=scaling),
            SLIDING: Rope(theta=local_theta, scaling=None),
        }
    else:
        by_type = reader.nested("rope_parameters")
        theta = reader.number("rope_theta", DEFAULT_THETAS[FULL], above=1.0)
        if not by_type.config or not set(by_type.config) <= {FULL, SLIDING}:
            problem = f"allowed is a dictionary with one for {FULL} and one for {SLIDING}"
            reader.fault("rope_parameters", problem)
        if reader.config.get("rope_scaling"):
            reader.fault("rope_scaling", "rope_parameters are given too; keep one of the two")
        ropes = {}
        for kind, fallback in ((FULL, theta), (SLIDING, local_theta)):
            settings = by_type.nested(kind)
            ropes[kind] = Rope(
                theta=settings.number("rope_theta", fallback, above=1.0),
                scaling=read_rope_scaling(settings, **sizes),
            )
    for kind, rope in ropes.items():
        rope_type = rope.scaling.rope_type if rope.scaling else "default"
        if rope_type not in ROPE_TYPES:
            problem = f"rope_type={rope_type} of {kind}: allowed are {', '.join(ROPE_TYPES)}"
            given = "rope_parameters" if reader.has("rope_parameters") else "rope_scaling"
            reader.fault(given, problem)
    return ropes
