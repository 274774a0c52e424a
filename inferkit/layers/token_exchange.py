"""Tokens of several DP ranks, computed together by a group that is wider than the attention's.

Every DP rank has its own tokens; its attention-TP ranks hold equal copies of them. A layer whose
TP group spans several DP ranks needs the tokens of all of them (legend: T = this DP rank's
tokens, Ta = those of all DP ranks of the group, in rank order):

    x [T, H] -- gather --> [Ta, H] -- layer, reduced over the group --> [Ta, N] -- own --> [T, N]
"""

import torch

from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.layers.context import ModelContext


class TokenExchange:
    """For one kind of layers (`"dense"` and so on); does nothing where the group spans no DP ranks.

    Building one is collective, and where it spans DP ranks they run in lock-step from then on.
    """

    def __init__(self, kind: str, ctx: ModelContext) -> None:
        layout, comm = ctx.comm.layout, ctx.comm
        self.span = layout.dp_span(kind)
        self.first_dp_rank = comm.dp_rank // self.span * self.span
        self.position = comm.dp_rank - self.first_dp_rank
        if self.span > 1:
            comm.joins_dp_ranks = True
            self.group = comm.register_group(
                f"{kind}_dp_group", subgroups=layout.dp_partition(kind)
            )

    def gather(self, x: torch.Tensor, num_rows: tuple[int, ...] | None) -> torch.Tensor:
        """[T, ...] -> [Ta, ...]; `num_rows` has the rows of every DP rank of the instance."""
        return x if self.span == 1 else self.group.all_gather_rows(x, self._share(num_rows))

    def own(self, x: torch.Tensor, num_rows: tuple[int, ...] | None) -> torch.Tensor:
        """[Ta, ...] -> [T, ...]: this DP rank's rows."""
        if self.span == 1:
            return x
        share = self._share(num_rows)
        start = sum(share[: self.position])
        return x[start : start + share[self.position]]

    def gather_tokens(self, x: torch.Tensor, metadata: ForwardMetaData) -> torch.Tensor:
        return self.gather(x, metadata.dp_num_tokens)

    def own_tokens(self, x: torch.Tensor, metadata: ForwardMetaData) -> torch.Tensor:
        return self.own(x, metadata.dp_num_tokens)

    def _share(self, num_rows: tuple[int, ...] | None) -> tuple[int, ...]:
        assert num_rows is not None, "DP ranks that compute together exchange their row counts"
        return num_rows[self.first_dp_rank : self.first_dp_rank + self.span]
