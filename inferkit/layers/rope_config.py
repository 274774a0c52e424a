"""Reads the rotary settings of a Hugging Face configuration, in both forms. Torch-free.

Older files have `rope_theta` and `rope_scaling` (with `type` or `rope_type`); transformers 5
writes one dictionary `rope_parameters` with both. What the numbers do is in `rotary.py`.
"""

from dataclasses import dataclass

from inferkit.core.hf_config import ConfigReader

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10_000.0
ROPE_KEYS = frozenset(
    {"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"}
)
"""Top-level keys that `read_rope` reads."""

_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_KEYS_OF_TYPE = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "longrope": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "short_factor",
            "long_factor",
        }
    ),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies differ from the default; fields of other types keep their defaults."""

    rope_type: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Context of the pre-training (llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    """Factor of cos and sin (None = by the formula of the type)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def read_rope(
    reader: ConfigReader,
    *,
    head_dim: int,
    max_position_embeddings: int,
    default_theta: float = DEFAULT_THETA,
) -> tuple[float, RopeScaling | None]:
    """(rope_theta, scaling or None for the default type); faults go to the reader."""
    key = _scaling_key(reader)
    if key is None:
        return reader.number("rope_theta", default_theta, above=1.0), None
    rope = reader.nested(key)
    theta = rope.number("rope_theta", default_theta, above=1.0)
    if not rope.has("rope_theta"):
        theta = reader.number("rope_theta", default_theta, above=1.0)
    elif reader.has("rope_theta") and reader.config["rope_theta"] != theta:
        reader.fault("rope_theta", f"contradicts {rope.label('rope_theta')}={theta:g}; keep one")
    scaling = read_rope_scaling(
        rope,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        original=reader.optional_integer("original_max_position_embeddings", minimum=1),
    )
    return theta, scaling


def read_rope_scaling(
    rope: ConfigReader,
    *,
    head_dim: int,
    max_position_embeddings: int,
    original: int | None = None,
) -> RopeScaling | None:
    """What one dictionary of rotary settings says beside its `rope_theta`; None = default type.

    Args:
        original: context of the pre-training, from outside the dictionary; it wins over the one
            inside, as in transformers.
    """
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        rope.fault("partial_rotary_factor", "these models rotate whole heads; allowed is 1.0")
    rope_type = _rope_type(rope)
    if rope.is_user_written:
        rope.check_known(_COMMON_KEYS | _KEYS_OF_TYPE[rope_type])
    if rope_type == "default":
        return None
    inner = rope.integer("original_max_position_embeddings", max_position_embeddings)
    return _read_scaling(rope, rope_type, head_dim, max_position_embeddings, original or inner)


def _scaling_key(reader: ConfigReader) -> str | None:
    """The one of the two keys that is set; two that differ are a fault."""
    found = [key for key in ("rope_parameters", "rope_scaling") if reader.config.get(key)]
    for key in found:
        value = reader.config[key]
        if not isinstance(value, dict):
            reader.fault(key, "allowed is a dictionary or null")
            return None
        if any(isinstance(entry, dict) for entry in value.values()):
            reader.fault(key, "settings per layer type are not supported; give one dictionary")
            return None
    if len(found) == 2 and reader.config[found[0]] != reader.config[found[1]]:
        reader.fault("rope_scaling", "contradicts rope_parameters; keep one of the two")
    return found[0] if found else None


def _rope_type(rope: ConfigReader) -> str:
    key = "rope_type" if rope.has("rope_type") else "type"
    value = rope.config.get(key, "default")
    if value not in ROPE_TYPES:
        rope.fault(key, f"allowed are {', '.join(ROPE_TYPES)}")
        return "default"
    return str(value)


def _read_scaling(
    rope: ConfigReader, rope_type: str, head_dim: int, max_position_embeddings: int, original: int
) -> RopeScaling:
    if rope_type in ("linear", "dynamic"):
        return RopeScaling(rope_type=rope_type, factor=rope.number("factor", minimum=1.0))
    if rope_type == "llama3":
        low = rope.number("low_freq_factor", above=0.0)
        high = rope.number("high_freq_factor", above=0.0)
        if rope.has("low_freq_factor") and rope.has("high_freq_factor") and high <= low:
            rope.fault("high_freq_factor", f"allowed is more than low_freq_factor={low:g}")
        return RopeScaling(
            rope_type=rope_type,
            factor=rope.number("factor", minimum=1.0),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )
    factor = rope.number("factor", max_position_embeddings / original, above=0.0)
    attention_factor = rope.optional_number("attention_factor", above=0.0)
    if rope_type == "yarn":
        return RopeScaling(
            rope_type=rope_type,
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=attention_factor,
            beta_fast=rope.number("beta_fast", 32.0, above=0.0),
            beta_slow=rope.number("beta_slow", 1.0, above=0.0),
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            truncate=rope.boolean("truncate", True),
        )
    return RopeScaling(
        rope_type=rope_type,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        short_factor=rope.numbers("short_factor", head_dim // 2),
        long_factor=rope.numbers("long_factor", head_dim // 2),
    )
