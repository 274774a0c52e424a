"""Attention whose softmax has one more term in its denominator: a sink, learned for each head.

A sink takes part of a query's attention and gives nothing back (gpt-oss model card; the idea is
arXiv 2309.17453). With lse = log(sum(exp(scores))) of a query and sink s of its head

    softmax over [scores | s], last column dropped  =  softmax(scores) * sigmoid(lse - s)

so plain attention that also returns lse is enough, exactly.
Legend: R = rows, N / Nk = query / KV heads, Q = queries, K = keys, D = head dim.
"""

import torch


def attend_with_sinks(
    q_RNQD: torch.Tensor,
    k_RNKD: torch.Tensor,
    v_RNKD: torch.Tensor,
    sinks: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    is_causal: bool = False,
    scale: float,
) -> torch.Tensor:
    """[R, N, Q, D] in the type of `q_RNQD`.

    Args:
        k_RNKD, v_RNKD: [R, Nk, K, D]; N is a multiple of Nk, heads of one KV head are adjacent.
        sinks: one logit per query, in a shape that broadcasts to [N, Q].
        bias: additive mask that broadcasts to [R, N, Q, K]; it leaves each query a key.
        is_causal: query i sees keys 0 to i; then `bias` is None.
    """
    attend = _attend_on_cpu if q_RNQD.device.type == "cpu" else attend_plain
    out, lse_RNQ = attend(q_RNQD, k_RNKD, v_RNKD, bias=bias, is_causal=is_causal, scale=scale)
    return out.mul_(torch.sigmoid(lse_RNQ - sinks.float())[..., None])


def _attend_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch's attention computes on a CPU, with the sums that it keeps to itself."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return out, lse


def attend_plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention [R, N, Q, D], lse [R, N, Q] float32) of any device, with scores in memory."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
    scores_RNQK = q.float() @ k.transpose(-1, -2) * scale
    if bias is not None:
        scores_RNQK += bias
    if is_causal:
        hidden_QK = torch.ones(scores_RNQK.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores_RNQK.masked_fill_(hidden_QK, float("-inf"))
    out = scores_RNQK.softmax(-1) @ v
    return out.to(q.dtype), scores_RNQK.logsumexp(-1)
