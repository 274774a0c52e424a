"""The experts of gpt-oss: biases, a clamped SwiGLU, and all experts of a layer in one tensor.

Legend: E = experts, M = rows of an expert, H = hidden size, I = intermediate size of an expert.
"""

import torch

from inferkit.layers.moe.experts import LocalExperts
from inferkit.layers.weights import StoredTensor, load_slice


def clamped_swiglu(gate_up_M2I: torch.Tensor, *, alpha: float, limit: float) -> torch.Tensor:
    """[M, 2I] -> [M, I]: gate * sigmoid(alpha * gate) * (up + 1), gate over up.

    The gate is cut at `limit`, up at both ends (gpt-oss model card, section 2.2).
    """
    gate, up = gate_up_M2I.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.add_(1.0))


class GptOssExperts(LocalExperts):
    """Takes `gate_up_proj` [E, H, 2I], `down_proj` [E, I, H] and `<name>_bias` [E, ...].

    Even columns of `gate_up_proj` are the gate's, odd ones those of the other half. One expert is
    read at a time, so that no more than that is held twice.
    """

    def load_tensor(self, name: str, stored: StoredTensor) -> None:
        """Take this rank's share of a checkpoint tensor, and read nothing else of it."""
        assert self.b13 is not None and self.b2 is not None, "these experts have biases"
        for idx in range(self.num_local):
            expert = OneExpert(stored, self.first + idx)
            if name == "down_proj":
                # The product needs [H, I]; it is stored as [I, H].
                start = self.tp_rank * self.local_size
                load_slice(self.w2[idx].t(), expert, dim=0, start=start)
            elif name == "down_proj_bias":
                self.b2.data[idx].copy_(expert.read())
            elif name == "gate_up_proj":
                self._load_gate_up(self.w13[idx], expert)
            else:
                assert name == "gate_up_proj_bias", f"no tensor {name!r} in these experts"
                self._load_gate_up(self.b13[idx], expert)

    def _load_gate_up(self, target: torch.Tensor, stored: StoredTensor) -> None:
        """[..., 2I] with alternating columns -> [2 * local, ...], gate over up."""
        size = self.local_size
        start = self.tp_rank * size
        end = max(start, min(start + size, stored.shape[-1] // 2))
        if end < start + size:
            target.data.zero_()  # what lies beyond the last column is padding
        leading = [slice(None)] * (len(stored.shape) - 1)
        columns = stored.read(*leading, slice(2 * start, 2 * end)).unflatten(-1, (-1, 2))
        target.data[: end - start].copy_(columns[..., 0].movedim(-1, 0))
        target.data[size : size + end - start].copy_(columns[..., 1].movedim(-1, 0))


class OneExpert:
    """One expert's part of a stored tensor [E, ...], as a stored tensor."""

    def __init__(self, stored: StoredTensor, expert_id: int) -> None:
        self.stored = stored
        self.expert_id = expert_id

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[1:]

    def read(self, *index: slice) -> torch.Tensor:
        return self.stored.read(slice(self.expert_id, self.expert_id + 1), *index)[0]
