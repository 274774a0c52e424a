"""Shape of a gpt-oss model, read from the keys of a Hugging Face config.json. Torch-free.

Knows the key names and default values of GptOssForCausalLM; knows no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferkit.core.decoder_keys import (
    FULL,
    SLIDING,
    read_architecture,
    read_layer_types,
    read_layer_windows,
)
from inferkit.core.hf_config import ConfigReader, check_same_meaning
from inferkit.core.parallel_layout import ParallelLayout, local_size
from inferkit.models.dense import arch as dense
from inferkit.models.moe.arch import MoEArch

ARCHITECTURE = "GptOssForCausalLM"
FAMILY = dense.Family(
    model_type="gpt_oss",
    head_dim=64,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=150_000.0,
    attention_bias=True,
    # Of published checkpoints; experts are dequantised as they are read.
    quant_method="mxfp4",
)
KNOWN_KEYS = dense.keys_of(FAMILY) | {
    "sliding_window",
    "layer_types",
    "num_local_experts",
    "num_experts_per_tok",
    "swiglu_alpha",
    "swiglu_limit",
    # Found in published files, without a meaning for inference here (some repeat a key above).
    "experts_per_token",
    "initial_context_length",
    "output_router_logits",
    "router_aux_loss_coef",
}
"""Keys that a user may write in `model.arch`."""

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
        architecture: without effect; this family has one.

    Raises:
        ConfigError: one line for each key that is missing, faulty, unknown or contradictory.
    """
    reader = ConfigReader.of(config, origin)
    reader.config = _with_rope(config)
    read_architecture(reader, {ARCHITECTURE: FAMILY.model_type}, architecture)
    if reader.is_user_written:
        reader.check_known(KNOWN_KEYS)
    arch = _read(reader)
    reader.raise_faults()
    return arch


def check_user_arch(
    user_arch: Mapping[str, Any], config: Mapping[str, Any], *, origin: str
) -> None:
    """Refuse keys of `model.arch` that say something else than the config.json at `origin`."""
    check_same_meaning(user_arch, config, origin=origin, parse_arch=parse_arch, known=KNOWN_KEYS)


def _with_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys with this family's rotary settings where there are none."""
    if config.get("rope_parameters") or config.get("rope_scaling"):
        return config
    return {**config, "rope_parameters": _DEFAULT_ROPE, "rope_scaling": None}


def _read(reader: ConfigReader) -> GptOssArch:
    fields = dense.read_fields(reader, FAMILY)
    num_layers = fields["num_hidden_layers"]
    alternating = [FULL if idx % 2 else SLIDING for idx in range(num_layers)]
    layer_types = read_layer_types(reader, num_layers, alternating)
    num_experts = reader.integer("num_local_experts")
    num_chosen = reader.integer("num_experts_per_tok", 4)
    if num_chosen > num_experts and reader.has("num_local_experts"):
        reader.fault("num_experts_per_tok", f"allowed is at most num_local_experts={num_experts}")
    fields |= {
        "architecture": ARCHITECTURE,
        "mlp_bias": True,
        "layer_windows": read_layer_windows(reader, layer_types, 128),
    }
    return GptOssArch(
        **fields,
        num_experts=num_experts,
        num_experts_per_tok=num_chosen,
        moe_intermediate_size=fields["intermediate_size"],
        norm_topk_prob=True,
        moe_layers=tuple(range(num_layers)),
        swiglu_alpha=reader.number("swiglu_alpha", 1.702),
        swiglu_limit=reader.number("swiglu_limit", 7.0, above=0.0),
    )
