"""Shape of Qwen3-MoE and Mixtral, read from the keys of a Hugging Face config.json. Torch-free.

Attention, norms and embeddings are those of a dense decoder, which reads its own keys; this page
knows the default values of these, and the keys of the experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from inferkit.core.decoder_keys import read_architecture
from inferkit.core.hf_config import ConfigReader, check_same_meaning
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

    mlp_part: ClassVar[str] = "experts"
    """With their routers, and the MLPs of layers without experts."""

    def _mlps_of_rank(self, layout: ParallelLayout) -> int:
        hidden, num_moe_layers = self.hidden_size, len(self.moe_layers)
        inner = local_size(self.moe_intermediate_size, layout.moe_tp_size)
        experts = self.num_experts // layout.moe_ep_size * 3 * hidden * inner
        mlp = 3 * hidden * local_size(self.intermediate_size, layout.dense_tp_size)
        total = num_moe_layers * (self.num_experts * hidden + experts)
        return total + (self.num_hidden_layers - num_moe_layers) * mlp


FAMILIES: Mapping[str, dense.Family] = {
    "Qwen3MoeForCausalLM": dense.Family(
        model_type="qwen3_moe",
        num_key_value_heads=4,
        max_position_embeddings=32768,
        qk_norm=True,
        # Where one is switched on it is that of every layer.
        has_window=True,
        has_window_switch=True,
    ),
    "MixtralForCausalLM": dense.Family(
        model_type="mixtral",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        bos_token_id=1,
        eos_token_ids=(2,),
        fixed_qkv_bias=False,
        has_window=True,
        window=None,
    ),
}
SPARSE = frozenset({"Qwen3MoeForCausalLM"})
"""With layers without experts, experts of a size of their own, weights not scaled to a sum of 1."""

_EXPERT_KEYS = frozenset(
    {
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        # Of training, or written by transformers, without a meaning for inference here.
        "max_window_layers",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
    }
)
_SPARSE_KEYS = frozenset(
    {"moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}
)


def known_keys(architecture: str) -> frozenset[str]:
    """Keys that a user may write in `model.arch` for this architecture."""
    keys = dense.keys_of(FAMILIES[architecture]) | _EXPERT_KEYS
    return keys | _SPARSE_KEYS if architecture in SPARSE else keys


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
    reader = ConfigReader.of(config, origin)
    model_types = {name: family.model_type for name, family in FAMILIES.items()}
    name = read_architecture(reader, model_types, architecture)
    if reader.is_user_written:
        reader.check_known(known_keys(name))
    in_dense = dense.read_fields(reader, FAMILIES[name])
    arch = MoEArch(architecture=name, **in_dense, **_read_experts(reader, name, in_dense))
    reader.raise_faults()
    return arch


def check_user_arch(
    user_arch: Mapping[str, Any], config: Mapping[str, Any], *, origin: str
) -> None:
    """Refuse keys of `model.arch` that say something else than the config.json at `origin`."""
    known = known_keys(parse_arch(config, origin=origin).architecture)
    check_same_meaning(user_arch, config, origin=origin, parse_arch=parse_arch, known=known)


def _read_experts(reader: ConfigReader, name: str, in_dense: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the experts; `in_dense` are those of the dense decoder."""
    names = [name for name in ("num_experts", "num_local_experts") if reader.has(name)]
    num_experts = reader.integer(names[0] if names else "num_experts")
    if len(names) == 2 and reader.config[names[0]] != reader.config[names[1]]:
        reader.fault("num_local_experts", f"num_experts={num_experts} is another name for it")
    top_k = reader.integer("num_experts_per_tok")
    if top_k > num_experts:
        reader.fault("num_experts_per_tok", f"allowed is 1 to num_experts={num_experts}")
    layers = range(in_dense["num_hidden_layers"])
    values = {"num_experts": num_experts, "num_experts_per_tok": top_k}
    if name not in SPARSE:
        return values | {
            "moe_intermediate_size": in_dense["intermediate_size"],
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
