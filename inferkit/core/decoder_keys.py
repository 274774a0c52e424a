"""Keys that the config.json of every decoder has, and the checks that all families share.

A family's `arch.py` adds the keys of its own. Rotary settings are in `layers/rope_config.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from inferkit.core.hf_config import ConfigReader

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"

DECODER_KEYS = frozenset(
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
        "bos_token_id",
        "eos_token_id",
        "quantization_config",
        # Of training, or written by transformers, without a meaning for inference here.
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
"""What a user may write in `model.arch` of any family."""


def read_architecture(
    reader: ConfigReader, model_types: Mapping[str, str], chosen: str | None
) -> str:
    """The architecture that the keys name, else the chosen one, else the only one.

    Args:
        model_types: architecture -> its `model_type`, of all that the family covers. The type is
            looked at where `architectures` is absent: some checkpoints keep one of their own.
        chosen: the model class of the chosen option; without effect if the family has it not.

    Raises:
        ConfigError: the keys name another one; at once, since all else depends on it.
    """
    named, model_type = reader.config.get("architectures"), reader.config.get("model_type")
    allowed = f"allowed is a list of one name: {', '.join(model_types)}"
    candidates = [name for name in model_types if chosen not in model_types or name == chosen]
    if named:
        for name in named if isinstance(named, list | tuple) else ():
            if name in model_types:
                return str(name)
        reader.fault("architectures", allowed)
    elif model_type is not None:
        for name in candidates:
            if model_types[name] == model_type:
                return name
        types = ", ".join(model_types[name] for name in candidates)
        reader.fault("model_type", f"allowed: {types}")
    elif len(candidates) == 1:
        return candidates[0]
    else:
        reader.missing("architectures", allowed)
    reader.raise_faults()
    raise AssertionError("a fault was noted above")


def check_quantization(reader: ConfigReader, method: str | None = None) -> None:
    """Only weights that are not quantised can be read, or those of `method`."""
    if not reader.config.get("quantization_config"):
        return
    allowed = "unquantised weights: bfloat16, float16, float32"
    if method is None:
        reader.fault("quantization_config", f"allowed are {allowed}")
    elif reader.nested("quantization_config").config.get("quant_method") != method:
        reader.fault("quantization_config", f"allowed is quant_method {method}, or {allowed}")


def check_kv_heads(reader: ConfigReader, num_heads: int, num_kv_heads: int) -> None:
    """Equally many query heads read each KV head."""
    if num_heads % num_kv_heads and reader.has("num_attention_heads"):
        reader.fault(
            "num_key_value_heads",
            f"num_attention_heads={num_heads} must be a multiple of it ({num_kv_heads} is used)",
        )


def read_even(reader: ConfigReader, key: str, default: int | None = None) -> int:
    """Size of what is rotated, which is done in pairs; even also where there is a fault."""
    num_faults = len(reader.faults)
    size = reader.integer(key, default)
    if size % 2 and len(reader.faults) == num_faults:
        reader.fault(key, f"rotary embeddings need an even head size, this is {size}")
    return size + size % 2


def read_layer_types(
    reader: ConfigReader, num_layers: int, default: Sequence[str]
) -> tuple[str, ...]:
    """FULL or SLIDING for each layer."""
    given = reader.config.get("layer_types")
    if given is None:
        return tuple(default)
    if not isinstance(given, list | tuple) or any(kind not in (FULL, SLIDING) for kind in given):
        reader.fault("layer_types", f"allowed is a list of {FULL} and {SLIDING}")
    elif len(given) != num_layers:
        reader.fault("layer_types", f"must have one entry for each of {num_layers} layers")
    else:
        return tuple(given)
    return (FULL,) * num_layers


def read_window(reader: ConfigReader, default: int | None) -> int | None:
    """The sliding window in tokens, the query's own included; an explicit null means none."""
    if "sliding_window" in reader.config:
        return reader.optional_integer("sliding_window", minimum=1)
    return default


def windows_of(layer_types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer; None = full attention."""
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def read_layer_windows(
    reader: ConfigReader, layer_types: Sequence[str], default: int
) -> tuple[int | None, ...]:
    """The window of each layer, where the types alone say which layers have one."""
    window = read_window(reader, default)
    if window is None and SLIDING in layer_types:
        reader.fault("sliding_window", f"layers of {SLIDING} need a window in tokens")
    return windows_of(layer_types, window)
