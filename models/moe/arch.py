"""Shape of Qwen3-MoE and Mixtral, read from the keys of a Hugging Face config.json. Torch-free.

Attention, norms and embeddings are those of a dense family, which reads its own keys; this page
knows the keys of the experts, and where the two families' default values differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from inferkit.core.errors import ConfigError
from inferkit.core.hf_config import USER_ARCH, ConfigFile, ConfigReader
from inferkit.core.parallel_layout import ParallelLayout, local_size
from inferkit.models.dense import arch as dense


@dataclass(frozen=True, kw_only=True)
class MoEArch(dense.DenseArch):
    """A dense decoder of which some layers have routed experts instead of one MLP."""

    num_experts: int
    """Routed experts of a layer."""
    num_experts_per_tok: int
    moe_intermediate_size: int
    """Inner size of one expert; `intermediate_size` is that of the layers without experts."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts are scaled to a sum of 1."""
    moe_layers: tuple[int, ...]
    """Layers with experts."""

    def _mlps_of_rank(self, layout: ParallelLayout) -> int:
        hidden, num_moe_layers = self.hidden_size, len(self.moe_layers)
        inner = local_size(self.moe_intermediate_size, layout.moe_tp_size)
        experts = self.num_experts // layout.moe_ep_size * 3 * hidden * inner
        mlp = 3 * hidden * local_size(self.intermediate_size, layout.dense_tp_size)
        total = num_moe_layers * (self.num_experts * hidden + experts)
        return total + (self.num_hidden_layers - num_moe_layers) * mlp


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What a config.json of this architecture leaves unsaid."""

    model_type: str
    dense_architecture: str
    """The family whose attention it has, and which reads the keys of all but the experts."""
    defaults: Mapping[str, Any]
    """Values of absent keys where that family would take others."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of that family which have no meaning here."""
    has_sparse_keys: bool = False
    """Layers without experts, experts of a size of their own, weights not renormalised."""


FAMILIES: Mapping[str, _Family] = {
    "Qwen3MoeForCausalLM": _Family(
        model_type="qwen3_moe",
        dense_architecture="Qwen3ForCausalLM",
        defaults={"num_key_value_heads": 4},
        # A window, where one is switched on, is that of every layer.
        fixed={"max_window_layers": 0, "layer_types": None},
        has_sparse_keys=True,
    ),
    "MixtralForCausalLM": _Family(
        model_type="mixtral",
        dense_architecture="MistralForCausalLM",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None, "rope_theta": 1e6},
    ),
}

_EXPERT_KEYS = frozenset({"num_experts", "num_local_experts", "num_experts_per_tok"})
_SPARSE_KEYS = frozenset(
    {"moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}
)
# Of training, or written by transformers, without a meaning for inference here.
_BOOKKEEPING_KEYS = frozenset(
    {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "max_window_layers"}
)


def known_keys(architecture: str) -> frozenset[str]:
    """Keys that a user may write in `model.arch` for this architecture."""
    family = FAMILIES[architecture]
    keys = dense.known_keys(family.dense_architecture) - set(family.fixed)
    keys |= _EXPERT_KEYS | _BOOKKEEPING_KEYS
    return keys | _SPARSE_KEYS if family.has_sparse_keys else keys


def parse_arch(
    config: Mapping[str, Any], *, origin: str | None = None, architecture: str | None = None
) -> MoEArch:
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
    values = _read_dense(reader, family)
    values |= _read_experts(reader, family, values)
    reader.raise_faults()
    return MoEArch(**values | {"architecture": name, "model_type": family.model_type})


def check_user_arch(
    user_arch: Mapping[str, Any], config: Mapping[str, Any], *, origin: str
) -> None:
    """Keys of `model.arch` beside a config.json at `origin` must mean what the file means.

    Raises:
        ConfigError: a line for each key that is unknown or differs.
    """
    in_file = parse_arch(config, origin=origin)
    known = known_keys(in_file.architecture)
    reader = ConfigReader(user_arch)
    reader.check_known(known)
    for key in known.intersection(user_arch):
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
    of_type = {family.model_type: name for name, family in FAMILIES.items()}
    if named:
        names = named if isinstance(named, list | tuple) else []
        for name in FAMILIES:
            if name in names:
                return name
        reader.fault("architectures", f"give a list with one name; {allowed}")
    elif fallback is not None:
        return fallback
    elif model_type is None:
        reader.missing("architectures", allowed)
    elif model_type in of_type:
        return of_type[model_type]
    else:
        reader.fault("model_type", f"allowed are {', '.join(of_type)}")
    reader.raise_faults()
    raise AssertionError("a fault was noted above")


def _read_dense(reader: ConfigReader, family: _Family) -> dict[str, Any]:
    """Fields of the dense family's architecture; its faults go to `reader`."""
    known = dense.known_keys(family.dense_architecture)
    keys = {key: value for key, value in reader.config.items() if key in known}
    keys |= {key: value for key, value in family.defaults.items() if key not in keys}
    keys |= {**family.fixed, "architectures": [family.dense_architecture]}
    keys.pop("model_type", None)
    if not reader.has("head_dim"):
        keys["head_dim"] = _head_dim(reader)
    if not reader.has("rope_theta") and _has_nested_theta(reader):
        keys.pop("rope_theta", None)
    try:
        arch = dense.parse_arch(keys, origin=reader.origin)
    except ConfigError as error:
        reader.faults += str(error).splitlines()
        return {}
    return {entry.name: getattr(arch, entry.name) for entry in fields(arch)}


def _has_nested_theta(reader: ConfigReader) -> bool:
    """Whether one of the rotary dictionaries has the base, which a default would contradict."""
    nested = (reader.config.get(key) for key in ("rope_parameters", "rope_scaling"))
    return any(isinstance(rope, Mapping) and "rope_theta" in rope for rope in nested)


def _head_dim(reader: ConfigReader) -> int | None:
    """hidden_size / num_attention_heads, in both families; None = these are at fault."""
    hidden_size = reader.config.get("hidden_size")
    num_heads = reader.config.get("num_attention_heads")
    if not isinstance(hidden_size, int) or not isinstance(num_heads, int) or num_heads < 1:
        return None
    if hidden_size % num_heads:
        reader.fault(
            "num_attention_heads", f"must divide hidden_size={hidden_size}, or give head_dim"
        )
        return None
    return hidden_size // num_heads


def _read_experts(
    reader: ConfigReader, family: _Family, dense_values: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of the experts; `dense_values` are those of `_read_dense`."""
    names = [name for name in ("num_experts", "num_local_experts") if reader.has(name)]
    num_experts = reader.integer(names[0] if names else "num_experts")
    if len(names) == 2 and reader.config[names[0]] != reader.config[names[1]]:
        reader.fault("num_local_experts", f"num_experts={num_experts} is another name for it")
    top_k = reader.integer("num_experts_per_tok")
    if top_k > num_experts:
        reader.fault("num_experts_per_tok", f"allowed is 1 to num_experts={num_experts}")
    layers = range(dense_values.get("num_hidden_layers", 0))
    values = {"num_experts": num_experts, "num_experts_per_tok": top_k}
    if not family.has_sparse_keys:
        return values | {
            "moe_intermediate_size": dense_values.get("intermediate_size"),
            "norm_topk_prob": True,
            "moe_layers": tuple(layers),
        }
    step = reader.integer("decoder_sparse_step", 1)
    without = reader.config.get("mlp_only_layers") or ()
    if not isinstance(without, list | tuple) or any(type(idx) is not int for idx in without):
        reader.fault("mlp_only_layers", "allowed is a list of layers without experts, from 0 on")
        without = ()
    return values | {
        "moe_intermediate_size": reader.integer("moe_intermediate_size"),
        "norm_topk_prob": reader.boolean("norm_topk_prob", False),
        "moe_layers": tuple(idx for idx in layers if (idx + 1) % step == 0 and idx not in without),
    }
