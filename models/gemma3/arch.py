"""Shape of a Gemma-3 text decoder, read from the keys of a Hugging Face config.json. Torch-free.

Knows the key names and default values of Gemma3ForCausalLM; knows no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferkit.core.decoder_keys import (
    DECODER_KEYS,
    FULL,
    SLIDING,
    check_kv_heads,
    check_quantization,
    read_architecture,
    read_even,
    read_layer_types,
    read_layer_windows,
)
from inferkit.core.hf_config import ConfigReader, check_same_meaning
from inferkit.layers.rope_config import ROPE_KEYS, RopeScaling, read_rope, read_rope_scaling
from inferkit.models.dense.arch import DenseArch

ARCHITECTURE = "Gemma3ForCausalLM"
MODEL_TYPE = "gemma3_text"
ACTIVATION = "gelu_pytorch_tanh"
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not depend on a length."""
DEFAULT_THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}

KNOWN_KEYS = (
    DECODER_KEYS
    | ROPE_KEYS
    | {
        "query_pre_attn_scalar",
        "attention_bias",
        "sliding_window",
        "layer_types",
        "sliding_window_pattern",
        "rope_local_base_freq",
        "hidden_activation",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
        # Found in published files, without a meaning for inference here.
        "_sliding_window_pattern",
        "cache_implementation",
    }
)
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

    @property
    def _norms(self) -> int:
        """Weights of all norms, those of single heads left out."""
        return (4 * self.num_hidden_layers + 1) * self.hidden_size


def parse_arch(
    config: Mapping[str, Any], *, origin: str | None = None, architecture: str | None = None
) -> Gemma3Arch:
    """Read the keys of a config.json, or of the `model.arch` that a user wrote.

    Args:
        origin: the file, named in messages (None = that of a ConfigFile, else `model.arch`, where
            unknown keys are faults too).
        architecture: without effect; this family has one.

    Raises:
        ConfigError: one line for each key that is missing, faulty, unknown or contradictory.
    """
    reader = ConfigReader.of(config, origin)
    read_architecture(reader, {ARCHITECTURE: MODEL_TYPE}, architecture)
    if reader.is_user_written:
        reader.check_known(KNOWN_KEYS)
    _check_unsupported(reader)
    arch = _read(reader)
    reader.raise_faults()
    return arch


def check_user_arch(
    user_arch: Mapping[str, Any], config: Mapping[str, Any], *, origin: str
) -> None:
    """Refuse keys of `model.arch` that say something else than the config.json at `origin`."""
    check_same_meaning(user_arch, config, origin=origin, parse_arch=parse_arch, known=KNOWN_KEYS)


def _check_unsupported(reader: ConfigReader) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if reader.has(key):
            reader.fault(key, "soft caps are not supported (Gemma-3 has none); allowed is null")
    if reader.boolean("use_bidirectional_attention", False):
        reader.fault("use_bidirectional_attention", "allowed is false: a decoder is causal")
    if reader.config.get("hidden_activation", ACTIVATION) != ACTIVATION:
        reader.fault("hidden_activation", f"allowed is {ACTIVATION}")
    check_quantization(reader)


def _read(reader: ConfigReader) -> Gemma3Arch:
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", 4)
    check_kv_heads(reader, num_heads, num_kv_heads)
    head_dim = read_even(reader, "head_dim", 256)
    positions = reader.integer("max_position_embeddings", 131_072)
    num_layers = reader.integer("num_hidden_layers")
    # Full attention in every n-th layer.
    period = reader.integer("sliding_window_pattern", 6)
    by_period = [SLIDING if (idx + 1) % period else FULL for idx in range(num_layers)]
    layer_types = read_layer_types(reader, num_layers, by_period)
    ropes = _ropes(reader, head_dim, positions)
    bias = reader.boolean("attention_bias", False)
    return Gemma3Arch(
        architecture=ARCHITECTURE,
        model_type=MODEL_TYPE,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_hidden_layers=num_layers,
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
        layer_windows=read_layer_windows(reader, layer_types, 4096),
        layer_types=layer_types,
        ropes=ropes,
        query_pre_attn_scalar=reader.number("query_pre_attn_scalar", 256.0, above=0.0),
        bos_token_id=next(iter(reader.token_ids("bos_token_id", (2,))), None),
        eos_token_ids=reader.token_ids("eos_token_id", (1,)),
    )


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
