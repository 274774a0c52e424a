"""Names and shapes of the tensors of a DeepSeek-V3 checkpoint (its README_WEIGHTS.md)."""

from inferkit.models.deepseek_v3.arch import DeepseekV3Arch

Shapes = dict[str, tuple[int, ...]]


def main_tensors(arch: DeepseekV3Arch) -> Shapes:
    """Those of the main model."""
    embedding = (arch.vocab_size, arch.hidden_size)
    tensors: Shapes = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": (arch.hidden_size,),
    }
    if not arch.tie_word_embeddings:
        tensors["lm_head.weight"] = embedding
    for idx in range(arch.num_hidden_layers):
        is_dense = idx < arch.num_leading_dense_layers
        tensors |= _below(f"model.layers.{idx}.", _layer(arch, is_dense=is_dense))
    return tensors


def mtp_prefixes(arch: DeepseekV3Arch) -> tuple[str, ...]:
    """What the names of each MTP layer's tensors begin with: they follow the main layers."""
    first = arch.num_hidden_layers
    return tuple(f"model.layers.{first + idx}." for idx in range(arch.num_mtp_layers))


def mtp_tensors(arch: DeepseekV3Arch) -> Shapes:
    """Those of the MTP layers that are read."""
    hidden = arch.hidden_size
    layer = _layer(arch, is_dense=False) | {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
    }
    tensors: Shapes = {}
    for prefix in mtp_prefixes(arch):
        tensors |= _below(prefix, layer)
    return tensors


def _below(prefix: str, tensors: Shapes) -> Shapes:
    return {f"{prefix}{name}": shape for name, shape in tensors.items()}


def _layer(arch: DeepseekV3Arch, *, is_dense: bool) -> Shapes:
    hidden = arch.hidden_size
    tensors = _below("self_attn.", _attention(arch)) | {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if is_dense:
        return tensors | _mlp("mlp.", hidden, arch.intermediate_size)
    tensors["mlp.gate.weight"] = (arch.num_experts, hidden)
    tensors["mlp.gate.e_score_correction_bias"] = (arch.num_experts,)
    tensors |= _mlp("mlp.shared_experts.", hidden, arch.shared_intermediate_size)
    for expert in range(arch.num_experts):
        tensors |= _mlp(f"mlp.experts.{expert}.", hidden, arch.moe_intermediate_size)
    return tensors


def _mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _attention(arch: DeepseekV3Arch) -> Shapes:
    hidden, num_heads, latent = arch.hidden_size, arch.num_attention_heads, arch.kv_lora_rank
    q_out = num_heads * arch.qk_head_dim
    stored = latent + arch.qk_rope_head_dim
    tensors: Shapes = {
        "kv_a_proj_with_mqa.weight": (stored, hidden),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (num_heads * (arch.qk_nope_head_dim + arch.v_head_dim), latent),
        "o_proj.weight": (hidden, num_heads * arch.v_head_dim),
    }
    biases: Shapes = {"kv_a_proj_with_mqa.bias": (stored,), "o_proj.bias": (hidden,)}
    if arch.q_lora_rank is None:
        tensors["q_proj.weight"] = (q_out, hidden)
    else:
        tensors["q_a_proj.weight"] = (arch.q_lora_rank, hidden)
        tensors["q_a_layernorm.weight"] = (arch.q_lora_rank,)
        tensors["q_b_proj.weight"] = (q_out, arch.q_lora_rank)
        biases["q_a_proj.bias"] = (arch.q_lora_rank,)
    return tensors | biases if arch.attention_bias else tensors
