"""Latent attention (MLA, arXiv 2405.04434 section 2.1) over a paged cache, in plain torch.

A token stores a latent c [C] and a rotated key part r [P], both shared by all heads. With W_k
[D, C] and W_v [V, C] of a head and its query (q [D], p [P]) the same scores and outputs come from

    expanded   keys [W_k c | r], values W_v c: ordinary attention, after W_k and W_v met every key
    absorbed   query [W_k^T q | p], keys [c | r], values c, W_v on the result: one KV head for all
               heads, after W_k and W_v met every query

Fresh rows expand: as many queries as keys, and heads of D + P are cheaper than of C + P. Decode
rows absorb: one query, many keys. Rows with context take what costs less: long chunks expand, a
few tokens after a long prefix (a prefix hit, drafts that are verified) absorb.

Legend: T = packed tokens, N = heads, C = latent size, D / P = head part without positions /
rotated, V = value size, L = keys of a row, n = rows or tokens of one group.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from inferkit.platforms.paged_cache import AttentionPlan, ContextRow, DecodeRows, FreshRows


def attend_latent(
    q_TNQ: torch.Tensor,
    latent_T1C: torch.Tensor,
    rope_T1P: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, ...],
    plan: "AttentionPlan",
    scale: float,
) -> torch.Tensor:
    """[T, N, V] of the step's queries; the step's tokens are in the cache already.

    Args:
        q_TNQ: Q = D + P, the rotated part last.
        latent_T1C, rope_T1P: what the step's tokens store.
        weights: W_k [N, D, C] and W_v [N, V, C] of the heads, each contiguous for speed.
        cache: latents [blocks, block size, 1, C] and rotated parts [blocks, block size, 1, P].
    """
    attention = _LatentAttention(*weights, scale)
    latent_TC, rope_TP = latent_T1C[:, 0], rope_T1P[:, 0]
    out_TNV = q_TNQ.new_empty(*q_TNQ.shape[:2], attention.value_size)
    for rows in plan.fresh:
        out_TNV[rows.tokens] = attention.fresh(
            q_TNQ[rows.tokens], latent_TC[rows.tokens], rope_TP[rows.tokens], rows
        )
    for row in plan.context:
        out_TNV[row.tokens] = attention.context(
            q_TNQ[row.tokens], latent_TC[row.tokens], rope_TP[row.tokens], cache, row
        )
    for group in plan.decode:
        if len(group.tokens) == len(q_TNQ):
            return attention.decode(q_TNQ, cache, group)
        out_TNV[group.tokens] = attention.decode(q_TNQ[group.tokens], cache, group)
    return out_TNV


def is_absorbing_cheaper(
    num_queries: int, num_keys: int, *, latent_size: int, nope_size: int, value_size: int
) -> bool:
    """By the multiply-adds of one head; those of the rotated part are the same in both forms."""
    pairs, head_size = num_queries * num_keys, nope_size + value_size
    absorbed = num_queries * latent_size * head_size + pairs * 2 * latent_size
    expanded = num_keys * latent_size * head_size + pairs * head_size
    return absorbed < expanded


@dataclass(frozen=True)
class _LatentAttention:
    """Both forms for the heads of one layer."""

    w_k_NDC: torch.Tensor
    w_v_NVC: torch.Tensor
    scale: float

    @property
    def latent_size(self) -> int:
        return self.w_k_NDC.shape[2]

    @property
    def nope_size(self) -> int:
        return self.w_k_NDC.shape[1]

    @property
    def value_size(self) -> int:
        return self.w_v_NVC.shape[1]

    def fresh(
        self, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, rows: "FreshRows"
    ) -> torch.Tensor:
        def split(x: torch.Tensor) -> torch.Tensor:
            return x.view(rows.num_rows, -1, *x.shape[1:]).transpose(1, 2)

        k, v = self.expand(latent, rope)
        out = F.scaled_dot_product_attention(
            split(q),
            split(k),
            split(v),
            attn_mask=rows.bias,
            is_causal=rows.bias is None,
            scale=self.scale,
        )
        out_nNV: torch.Tensor = out.transpose(1, 2).flatten(0, 1)[..., : self.value_size]
        return out_nNV

    def context(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        row: "ContextRow",
    ) -> torch.Tensor:
        num_cached = len(row.context_slots)
        keys = self.gather(cache, row.context_slots, num_more=len(q))
        keys[num_cached:] = torch.cat((latent, rope), dim=-1)
        is_absorbed = is_absorbing_cheaper(
            len(q),
            len(keys),
            latent_size=self.latent_size,
            nope_size=self.nope_size,
            value_size=self.value_size,
        )
        if is_absorbed:
            q = self.absorb(q)
            k = v = keys[:, None].expand(-1, q.shape[1], -1)
        else:
            k, v = self.expand(keys[:, : self.latent_size], keys[:, self.latent_size :])
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=row.bias,
            scale=self.scale,
        )[0].transpose(0, 1)
        return self.values(out) if is_absorbed else out[..., : self.value_size]

    def decode(
        self, q: torch.Tensor, cache: tuple[torch.Tensor, ...], group: "DecodeRows"
    ) -> torch.Tensor:
        """The heads stand in for queries of the one KV head: keys are read once."""
        keys = self.gather(cache, group.slots).unflatten(0, (len(q), 1, -1))
        out = F.scaled_dot_product_attention(
            self.absorb(q)[:, None], keys, keys, attn_mask=group.bias, scale=self.scale
        )
        return self.values(out[:, 0])

    def gather(
        self, cache: tuple[torch.Tensor, ...], slots: torch.Tensor, num_more: int = 0
    ) -> torch.Tensor:
        """[L + num_more, C + P]: the cached keys of the absorbed form, then room for more.

        Values are the first C columns; as the whole key they let the fused CPU attention run,
        which wants keys and values of one size.
        """
        latents, ropes = (tensor.flatten(0, 2) for tensor in cache)
        num_cached, size = len(slots), self.latent_size
        keys = latents.new_empty(num_cached + num_more, size + ropes.shape[-1])
        torch.index_select(latents, 0, slots, out=keys[:num_cached, :size])
        torch.index_select(ropes, 0, slots, out=keys[:num_cached, size:])
        return keys

    def expand(
        self, latent_LC: torch.Tensor, rope_LP: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [L, N, Q], and values [L, N, >= V] padded to the size of the keys."""
        num_heads, size = len(self.w_k_NDC), self.nope_size
        query_size = size + rope_LP.shape[-1]
        k_LNQ = latent_LC.new_empty(len(latent_LC), num_heads, query_size)
        k_LND = F.linear(latent_LC, self.w_k_NDC.flatten(0, 1))
        k_LNQ[..., :size] = k_LND.unflatten(1, (num_heads, -1))
        k_LNQ[..., size:] = rope_LP[:, None]
        v_LNV = F.linear(latent_LC, self.w_v_NVC.flatten(0, 1)).unflatten(1, (num_heads, -1))
        return k_LNQ, F.pad(v_LNV, (0, max(0, query_size - self.value_size)))

    def absorb(self, q_nNQ: torch.Tensor) -> torch.Tensor:
        """[n, N, Q] -> [n, N, C + P]."""
        q_nND, q_nNP = q_nNQ[..., : self.nope_size], q_nNQ[..., self.nope_size :]
        q_NnC = torch.bmm(q_nND.transpose(0, 1), self.w_k_NDC)
        return torch.cat((q_NnC.transpose(0, 1), q_nNP), dim=-1)

    def values(self, out_nNC: torch.Tensor) -> torch.Tensor:
        """[n, N, >= C] attention over latents -> [n, N, V]."""
        out_NnC = out_nNC[..., : self.latent_size].transpose(0, 1)
        return torch.bmm(out_NnC, self.w_v_NVC.transpose(1, 2)).transpose(0, 1)
