import pytest
import torch

from inferkit.layers.context import ModelContext
from inferkit.layers.norm import UnitOffsetRMSNorm
from inferkit.platforms.cpu import CpuPlatform


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_a_unit_offset_norm_are_distances_from_one(dtype):
    ctx = ModelContext(platform=CpuPlatform(), dtype=dtype, block_size=16)
    norm = UnitOffsetRMSNorm(16, 1e-5, ctx=ctx)
    # One plus such a weight is one in bfloat16: the sum must be of float32.
    norm.weight.data.fill_(2.0**-10)
    x = (torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * (1.0 + 2.0**-10)
    assert norm(x).dtype is dtype
    tolerance = 1e-6 if dtype is torch.float32 else 0.0
    torch.testing.assert_close(norm(x), expected.to(dtype), atol=0, rtol=tolerance)
