"""The model's view of one step.

Legend: T = packed query tokens, R = requests, S = rows that are sampled, W = block table width;
Tp and Rp include padding rows (query 1, KV 1, all-zero table, slots inside the null block).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ForwardMetaData:
    """Frozen, and valid for mixed batches: request i has q_i >= 1 query tokens, kv_i >= q_i.

    Integer tensors are int64 on the model's device unless said otherwise.
    """

    is_prefill: bool
    """Some row still computes its prompt."""
    kv_len: "torch.Tensor"
    """[Rp] position of the last query token."""
    actual_seq_lengths_q: "torch.Tensor"
    """[Rp] query tokens of each request."""
    actual_seq_lengths_kv: "torch.Tensor"
    """[Rp] visible KV of each request, this step's tokens included (kv_len + 1)."""
    actual_seq_lengths_cu_q: "torch.Tensor"
    """[Rp] inclusive prefix sums of actual_seq_lengths_q."""
    actual_seq_lengths_cu_kv: "torch.Tensor"
    """[Rp] inclusive prefix sums of actual_seq_lengths_kv."""
    actual_seq_lengths_list_q: list[int] | None
    """Host copies, where the platform or the execution mode wants them."""
    actual_seq_lengths_list_kv: list[int] | None
    max_q_len: int
    max_kv_len: int
    prompt_tokens: int
    """Query tokens that belong to prompts (before padding)."""
    prompt_len: "torch.Tensor"
    """[Tp] prompt length of each token's request (rope scalings that depend on it); 0 = padding,
    or of a dummy batch."""
    logits_indices: "torch.Tensor"
    """[S] packed index of each token whose logits are wanted."""
    block_table: "dict[str, torch.Tensor] | None"
    """manager key -> [Rp, W] int32 block ids, padded with the null block 0; None = contiguous."""
    slot_mapping: "dict[str, torch.Tensor] | None"
    """manager key -> [Tp] slot of each query token: table[pos // bs] * bs + pos % bs."""
    attention_plans: dict[str, Any]
    """manager key -> what the platform derived once for all layers of this step."""
    cache_rows: "torch.Tensor | None" = None
    """[Rp] row of the contiguous cache of each request (models without a cache spec); 0 = null."""
    attention_mask: "torch.Tensor | None" = None
    is_warm_up: bool = False
    dp_num_tokens: tuple[int, ...] | None = None
    """Tp of every DP rank, where DP ranks compute together (lock-step); else None."""
    dp_num_sampled: tuple[int, ...] | None = None
    """S of every DP rank, likewise."""
    dp_is_prefill: bool = False
    """Some DP rank that computes with this one still computes a prompt."""
    cp_metadata: Any = None
