import math

import torch

from inferkit.layers.functional import gelu_tanh_and_mul


def test_gelu_tanh_and_mul():
    gate_up = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    gate, up = gate_up[:, :4].clone(), gate_up[:, 4:]
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(gelu_tanh_and_mul(gate_up), 0.5 * gate * (1 + inner.tanh()) * up)
