"""Shape of DeepSeek-V3 and R1, read from the keys of a Hugging Face config.json. Torch-free.

Sizes of one head, with the names of the paper (arXiv 2412.19437, section 2.1): a query and a key
have a part without positions (nope) and a rotated one (rope); keys without positions and values
of all heads come from one latent per token.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferkit.core.cache_spec import DTYPE_BYTES
from inferkit.core.decoder_keys import (
    DECODER_KEYS,
    check_quantization,
    read_architecture,
    read_even,
)
from inferkit.core.hf_config import ConfigReader, check_same_meaning
from inferkit.core.parallel_layout import HeadLayout, ParallelLayout, local_size
from inferkit.layers.rope_config import ROPE_KEYS, RopeScaling, read_rope

ARCHITECTURE = "DeepseekV3ForCausalLM"
MODEL_TYPE = "deepseek_v3"
QUANT_METHOD = "fp8"


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Arch:
    """What the layers of a DeepSeek-V3 need to know."""

    architecture: str
    """The Hugging Face class name."""
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner size of the layers without experts."""
    num_hidden_layers: int
    num_mtp_layers: int
    """Layers after these that predict one further token each; a checkpoint may lack them."""
    num_attention_heads: int
    q_lora_rank: int | None
    """Size of the latent of the queries; None = they are projected directly."""
    kv_lora_rank: int
    """Size of the latent of keys and values, which is what the cache stores."""
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attention_bias: bool
    """Biases on the projections to the latents, and on the output."""
    rope_interleave: bool
    """Rotary pairs are stored side by side, not in two halves."""
    rope_theta: float
    rope_scaling: RopeScaling | None
    num_experts: int
    """Routed experts of a layer."""
    num_experts_per_tok: int
    num_expert_groups: int
    num_groups_per_tok: int
    """Groups that the experts of a token may come from."""
    moe_intermediate_size: int
    """Inner size of one expert."""
    num_shared_experts: int
    """Experts that every token takes, held as one of their summed size."""
    num_leading_dense_layers: int
    norm_topk_prob: bool
    """Whether the weights of a token's experts are scaled to a sum of 1, before the factor."""
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    hidden_act: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_key_value_heads(self) -> int:
        """Every head has keys and values of its own, once they are expanded."""
        return self.num_attention_heads

    @property
    def num_moe_layers(self) -> int:
        return max(0, self.num_hidden_layers - self.num_leading_dense_layers)

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def max_context_len(self) -> int:
        """Longest request in tokens: the trained positions, stretched by the rope scaling."""
        scaling, positions = self.rope_scaling, self.max_position_embeddings
        if scaling is None:
            return positions
        return max(positions, int(scaling.original_max_position_embeddings * scaling.factor))

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores, with YaRN's temperature of whole heads where the file sets one.

        `mscale_all_dim` weighs it; it counts twice, for the query and for the key. What `mscale`
        asks of the rotated part beyond that is in cos and sin.
        """
        scale = 1.0 / math.sqrt(self.qk_head_dim)
        scaling = self.rope_scaling
        if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1.0:
            return scale
        temperature = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0
        return scale * temperature * temperature

    def heads(self, layout: ParallelLayout) -> HeadLayout:
        return HeadLayout(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            tp_size=layout.attn_tp_size,
        )

    @property
    def num_parameters(self) -> int:
        """Weights of the main model; a tied head counts once."""
        return self.num_parameters_of_rank(ParallelLayout())

    def num_parameters_of_rank(self, layout: ParallelLayout) -> int:
        """Weights of the main model that one rank holds, padding included; equal on all ranks."""
        return sum(self.parameter_parts_of_rank(layout).values())

    def parameter_parts_of_rank(self, layout: ParallelLayout) -> dict[str, int]:
        """The same, by part of the model; a tied head that is no copy counts with the embedding."""
        hidden = self.hidden_size
        num_dense_layers = self.num_hidden_layers - self.num_moe_layers
        mlp = 3 * hidden * local_size(self.intermediate_size, layout.dense_tp_size)
        parts = {
            "attention": self.num_hidden_layers * self._attention_of_rank(layout),
            "MLPs": num_dense_layers * mlp,
            "experts": self.num_moe_layers * self._experts_of_rank(layout),
            "norms": (2 * self.num_hidden_layers + 1) * hidden,
            "embedding": hidden * local_size(self.vocab_size, layout.embed_tp_size),
        }
        if not self.tie_word_embeddings or layout.embed_tp_size != layout.lmhead_tp_size:
            parts["head"] = hidden * local_size(self.vocab_size, layout.lmhead_tp_size)
        return parts

    def num_mtp_parameters_of_rank(self, layout: ParallelLayout) -> int:
        """What the MTP layers add on one rank, for a checkpoint that has them."""
        hidden = self.hidden_size
        layer = self._attention_of_rank(layout) + self._experts_of_rank(layout)
        return self.num_mtp_layers * (layer + 2 * hidden * hidden + 5 * hidden)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """KV cache of one token over all layers, in bytes, for "float32" and the like."""
        size = self.kv_lora_rank + self.qk_rope_head_dim
        return self.num_hidden_layers * size * DTYPE_BYTES[dtype]

    def kv_bytes_per_token_of_rank(self, dtype: str, layout: ParallelLayout) -> int:
        """The same: every rank of an attention group stores the whole latent."""
        return self.kv_bytes_per_token(dtype)

    def _attention_of_rank(self, layout: ParallelLayout) -> int:
        hidden, num_heads = self.hidden_size, self.heads(layout).num_local_heads
        q_out, latent = num_heads * self.qk_head_dim, self.kv_lora_rank
        total = hidden * q_out
        if self.q_lora_rank is not None:
            total = self.q_lora_rank * (hidden + self.attention_bias + 1 + q_out)
        total += (hidden + self.attention_bias) * (latent + self.qk_rope_head_dim) + latent
        total += latent * num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        columns = num_heads * self.v_head_dim
        columns *= max(1, layout.attn_tp_size // layout.o_proj_tp_size)
        return total + hidden * (
            local_size(columns, layout.dp_span("o_proj")) + self.attention_bias
        )

    def _experts_of_rank(self, layout: ParallelLayout) -> int:
        columns = local_size(self.moe_intermediate_size, layout.moe_tp_size)
        columns *= self.num_experts // layout.moe_ep_size
        columns += local_size(self.shared_intermediate_size, layout.shared_tp_size)
        return 3 * self.hidden_size * columns + self.num_experts * (self.hidden_size + 1)


KNOWN_KEYS = (
    DECODER_KEYS
    | ROPE_KEYS
    | {
        "num_nextn_predict_layers",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "qk_head_dim",
        "v_head_dim",
        "attention_bias",
        "rope_interleave",
        "n_routed_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "moe_intermediate_size",
        "n_shared_experts",
        "first_k_dense_replace",
        "norm_topk_prob",
        "routed_scaling_factor",
        "scoring_func",
        "topk_method",
        "moe_layer_freq",
        "hidden_act",
        # Of training, or written by transformers, without a meaning for inference here.
        "aux_loss_alpha",
        "ep_size",
        "output_router_logits",
        "seq_aux",
    }
)
"""Keys that a user may write in `model.arch`."""


def parse_arch(
    config: Mapping[str, Any], *, origin: str | None = None, architecture: str | None = None
) -> DeepseekV3Arch:
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
    arch = _read(reader)
    reader.raise_faults()
    return arch


def check_user_arch(
    user_arch: Mapping[str, Any], config: Mapping[str, Any], *, origin: str
) -> None:
    """Refuse keys of `model.arch` that say something else than the config.json at `origin`."""
    check_same_meaning(user_arch, config, origin=origin, parse_arch=parse_arch, known=KNOWN_KEYS)


def _read(reader: ConfigReader) -> DeepseekV3Arch:
    _check_fixed(reader)
    num_heads = reader.integer("num_attention_heads")
    nope = reader.integer("qk_nope_head_dim", 128)
    rope = read_even(reader, "qk_rope_head_dim", 64)
    # Other values of these cannot be run; files repeat them.
    _check_derived(reader, "num_key_value_heads", num_heads, "num_attention_heads")
    if reader.is_user_written:
        _check_derived(reader, "head_dim", rope, "qk_rope_head_dim")
        _check_derived(reader, "qk_head_dim", nope + rope, "qk_nope_head_dim + qk_rope_head_dim")
    max_positions = reader.integer("max_position_embeddings", 4096)
    theta, scaling = read_rope(reader, head_dim=rope, max_position_embeddings=max_positions)
    if scaling is not None and scaling.rope_type != "yarn":
        key = "rope_parameters" if reader.has("rope_parameters") else "rope_scaling"
        reader.fault(key, "allowed rope types of this family are default and yarn")
        scaling = None
    q_lora_rank = reader.integer("q_lora_rank", 1536)
    is_direct = "q_lora_rank" in reader.config and reader.config["q_lora_rank"] is None
    num_experts, num_chosen, num_groups, num_chosen_groups = _read_routing(reader)
    return DeepseekV3Arch(
        architecture=ARCHITECTURE,
        model_type=MODEL_TYPE,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_hidden_layers=reader.integer("num_hidden_layers"),
        num_mtp_layers=reader.integer("num_nextn_predict_layers", 1, minimum=0),
        num_attention_heads=num_heads,
        q_lora_rank=None if is_direct else q_lora_rank,
        kv_lora_rank=reader.integer("kv_lora_rank", 512),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=reader.integer("v_head_dim", 128),
        attention_bias=reader.boolean("attention_bias", False),
        rope_interleave=reader.boolean("rope_interleave", True),
        rope_theta=theta,
        rope_scaling=scaling,
        num_experts=num_experts,
        num_experts_per_tok=num_chosen,
        num_expert_groups=num_groups,
        num_groups_per_tok=num_chosen_groups,
        moe_intermediate_size=reader.integer("moe_intermediate_size", 2048),
        num_shared_experts=reader.integer("n_shared_experts", 1),
        num_leading_dense_layers=reader.integer("first_k_dense_replace", 3, minimum=0),
        norm_topk_prob=reader.boolean("norm_topk_prob", True),
        routed_scaling_factor=reader.number("routed_scaling_factor", 2.5),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6, above=0.0),
        max_position_embeddings=max_positions,
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        hidden_act="silu",
        bos_token_id=next(iter(reader.token_ids("bos_token_id", (0,))), None),
        eos_token_ids=reader.token_ids("eos_token_id", (1,)),
    )


def _check_fixed(reader: ConfigReader) -> None:
    """Keys of which this family runs one value only."""
    fixed = {
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
    for key, allowed in fixed.items():
        if reader.has(key) and reader.config[key] != allowed:
            reader.fault(key, f"allowed is {allowed}")
    check_quantization(reader, QUANT_METHOD)


def _check_derived(reader: ConfigReader, key: str, value: int, formula: str) -> None:
    if reader.has(key) and reader.config[key] != value:
        reader.fault(key, f"must be {formula}={value}; drop the key")


def _read_routing(reader: ConfigReader) -> tuple[int, int, int, int]:
    """(experts, experts of a token, groups, groups of a token)."""
    num_experts = reader.integer("n_routed_experts", 256)
    num_groups = reader.integer("n_group", 8)
    num_chosen_groups = reader.integer("topk_group", 4)
    num_chosen = reader.integer("num_experts_per_tok", 8)
    if num_experts % num_groups or num_experts // num_groups < 2:
        reader.fault(
            "n_group", f"must divide n_routed_experts={num_experts} into groups of 2 or more"
        )
    elif num_chosen_groups > num_groups:
        reader.fault("topk_group", f"allowed is 1 to n_group={num_groups}")
    elif num_chosen > num_chosen_groups * (num_experts // num_groups):
        limit = num_chosen_groups * (num_experts // num_groups)
        reader.fault(
            "num_experts_per_tok", f"topk_group={num_chosen_groups} groups have {limit} experts"
        )
    return num_experts, num_chosen, num_groups, num_chosen_groups
