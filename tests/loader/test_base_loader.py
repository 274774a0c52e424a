"""The contract between a model class and the loaders, with a class that breaks it."""

import pytest
import torch
from torch import nn

from inferkit.core.errors import ModelLoadError
from inferkit.loader.base_loader import WeightAssigner


class Packed(nn.Module):
    packed_modules_mapping = {"left": ("both", "l"), "right": ("both", "r")}

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(3, bias=False)
        for parameter in self.both.parameters():
            parameter.weight_loader = self.load  # type: ignore[attr-defined]

    @staticmethod
    def load(parameter: torch.Tensor, tensor: torch.Tensor, shard_id: str | None) -> None:
        start = {"l": 0, "r": 2}[str(shard_id)]
        parameter.data[start : start + 2] = tensor


def test_packed_parameters_take_their_shards() -> None:
    model = Packed()
    assigner = WeightAssigner(model)
    for side, value in (("right", 2.0), ("left", 1.0)):
        assigner.assign(f"{side}.weight", torch.full((2, 3), value))
        assigner.assign(f"{side}.bias", torch.full((2,), value))
    assigner.assign("norm.weight", torch.zeros(3))
    assigner.check_complete()
    assert model.both.weight[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert model.both.bias.tolist() == [1.0, 1.0, 2.0, 2.0]


def test_a_shard_that_never_came_is_named() -> None:
    assigner = WeightAssigner(Packed())
    assigner.assign("left.weight", torch.zeros(2, 3))
    assigner.assign("left.bias", torch.zeros(2))
    assigner.assign("right.bias", torch.zeros(2))
    with pytest.raises(ModelLoadError, match=r"no tensor for the parameters both\.weight, norm\."):
        assigner.check_complete()


def test_a_name_without_a_parameter_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"names scale, but it has no parameter scale"):
        WeightAssigner(Packed()).assign("scale", torch.zeros(1))


def test_a_shape_that_the_parameter_has_not_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"norm\.weight has shape \(1,\), .* has \(3,\)"):
        WeightAssigner(Packed()).assign("norm.weight", torch.zeros(1))
