"""The experts of one layer that live on this rank, and their grouped computation.

Legend: M = rows sorted by expert, H = hidden size, E = experts of this rank, I = share of the
intermediate size of this rank.
"""

from collections.abc import Sequence

import torch
from torch import nn

from inferkit.core.parallel_layout import local_size
from inferkit.layers.context import ModelContext
from inferkit.layers.functional import Activation, silu_and_mul
from inferkit.layers.weights import StoredTensor, load_slice


class LocalExperts(nn.Module):
    """Experts [first, first + E) with weights w13 [E, 2I, H] (gate over up) and w2 [E, H, I].

    Takes checkpoint tensors `<expert>.<gate_proj|up_proj|down_proj>.weight` (or the names in
    `shard_names`) and reads only those of its own experts, and of these only its share.
    """

    shard_names = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Activation = silu_and_mul,
        ctx: ModelContext,
    ) -> None:
        super().__init__()
        tp_group, ep_group = ctx.comm.group("moe_tp_group"), ctx.comm.group("moe_ep_group")
        assert num_experts % ep_group.size == 0, (
            f"{num_experts} experts on {ep_group.size} ranks; the configuration's check refuses it"
        )
        self.num_local = num_experts // ep_group.size
        self.first = ep_group.rank * self.num_local
        self.tp_rank = tp_group.rank
        self.local_size = local_size(intermediate_size, tp_group.size)
        self.platform = ctx.platform
        self.activation = activation
        self.w13: torch.Tensor = ctx.empty(self.num_local, 2 * self.local_size, hidden_size)
        self.w2: torch.Tensor = ctx.empty(self.num_local, hidden_size, self.local_size)
        self.b13 = ctx.empty(self.num_local, 2 * self.local_size) if bias else None
        self.b2 = ctx.empty(self.num_local, hidden_size) if bias else None
        self._packed: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def load_tensor(self, name: str, stored: StoredTensor) -> None:
        """Take this rank's share of the checkpoint tensor `<expert>.<projection>.weight`."""
        expert, projection, kind = name.split(".")
        assert kind == "weight", f"{name}: experts with biases need a load_tensor of their own"
        idx = int(expert) - self.first
        if not 0 <= idx < self.num_local:
            return
        shard, size, start = self.shard_names[projection], self.local_size, self.tp_rank
        if shard == "down":
            load_slice(self.w2[idx], stored, dim=1, start=start * size)
        else:
            target = self.w13[idx, :size] if shard == "gate" else self.w13[idx, size:]
            load_slice(target, stored, dim=0, start=start * size)

    def pack(self) -> None:
        """Bring each expert's weights into the device's own layout; the plain ones go."""
        w13 = [self.platform.pack_weight(weight) for weight in self.w13]
        w2 = [self.platform.pack_weight(weight) for weight in self.w2]
        self._packed = (w13, w2)
        del self.w13, self.w2

    def forward(self, x_MH: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Rows sorted by local expert, `counts[e]` each -> [M, H], partial over moe_tp_group.

        The bias of the second product is added on the first rank of that group only.
        """
        w13, w2 = self._packed or (self.w13, self.w2)
        outputs = []
        for idx, x in enumerate(x_MH.split(list(counts))):
            if not len(x):
                continue
            b13 = None if self.b13 is None else self.b13[idx]
            b2 = None if self.b2 is None or self.tp_rank else self.b2[idx]
            h = self.activation(self.platform.linear(x, w13[idx], b13))
            outputs.append(self.platform.linear(h, w2[idx], b2))
        return torch.cat(outputs) if outputs else x_MH[:0]
