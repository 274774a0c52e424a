"""The contract between a model class and the loaders, with a class that breaks it."""

import pytest
import torch
from torch import nn

from inferkit.core.errors import ModelLoadError
from inferkit.layers.weights import StoredTensor
from inferkit.loader.base_loader import WeightAssigner
from tests.stored import InMemory


class Packed(nn.Module):
    packed_modules_mapping = {"left": ("both", "l"), "right": ("both", "r")}

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(3, bias=False)
        for parameter in self.both.parameters():
            parameter.weight_loader = self.load  # type: ignore[attr-defined]

    @staticmethod
    def load(parameter: torch.Tensor, stored: StoredTensor, shard_id: str | None) -> None:
        start = {"l": 0, "r": 2}[str(shard_id)]
        parameter.data[start : start + 2] = stored.read()


class Experts(nn.Module):
    """Of four experts it holds those of one rank, stacked into one parameter."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = 2 * rank
        self.gate_proj = nn.Parameter(torch.full((2, 4, 3), float("nan")))

    def load_tensor(self, name: str, stored: StoredTensor) -> None:
        expert, _, rest = name.partition(".")
        assert rest == "gate_proj.weight"
        if 0 <= int(expert) - self.first < 2:
            self.gate_proj.data[int(expert) - self.first] = stored.read()


class Mixture(nn.Module):
    packed_modules_mapping = {"gate_proj": ("gate_up_proj", "gate")}

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = Experts(rank)
        self.mlp.norm = nn.LayerNorm(3, bias=False)


class Tied(nn.Module):
    tied_tensors = {"embed.weight": "head.weight"}

    def __init__(self, *, has_head: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 3)
        if has_head:
            self.head = nn.Linear(3, 2, bias=False)
            self.head.weight.weight_loader = self.load  # type: ignore[assignment]

    @staticmethod
    def load(parameter: torch.Tensor, stored: StoredTensor, shard_id: str | None) -> None:
        assert shard_id is None
        parameter.data.copy_(stored.read(slice(2, 4)))


def test_packed_parameters_take_their_shards() -> None:
    model = Packed()
    assigner = WeightAssigner(model)
    for side, value in (("right", 2.0), ("left", 1.0)):
        assigner.assign(f"{side}.weight", InMemory(torch.full((2, 3), value)))
        assigner.assign(f"{side}.bias", InMemory(torch.full((2,), value)))
    assigner.assign("norm.weight", InMemory(torch.zeros(3)))
    assigner.check_complete()
    assert model.both.weight[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert model.both.bias.tolist() == [1.0, 1.0, 2.0, 2.0]


def test_a_shard_that_never_came_is_named() -> None:
    assigner = WeightAssigner(Packed())
    assigner.assign("left.weight", InMemory(torch.zeros(2, 3)))
    assigner.assign("left.bias", InMemory(torch.zeros(2)))
    assigner.assign("right.bias", InMemory(torch.zeros(2)))
    with pytest.raises(ModelLoadError, match=r"no tensor for the parameters both\.weight, norm\."):
        assigner.check_complete()


def test_a_name_without_a_parameter_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"names scale, but it has no parameter scale"):
        WeightAssigner(Packed()).assign("scale", InMemory(torch.zeros(1)))


def test_a_shape_that_the_parameter_has_not_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"norm\.weight has shape \(1,\), .* has \(3,\)"):
        WeightAssigner(Packed()).assign("norm.weight", InMemory(torch.zeros(1)))


def test_a_module_takes_the_tensors_below_it_and_reads_what_it_holds() -> None:
    tensors = {idx: InMemory(torch.full((4, 3), float(idx))) for idx in range(4)}
    for rank in (0, 1):
        model = Mixture(rank)
        assigner = WeightAssigner(model)
        for idx, stored in tensors.items():
            stored.num_reads = 0
            assigner.assign(f"mlp.experts.{idx}.gate_proj.weight", stored)
        assigner.assign("mlp.norm.weight", InMemory(torch.ones(3)))
        assigner.check_complete()
        assert model.mlp.experts.gate_proj[:, 0, 0].tolist() == [2.0 * rank, 2.0 * rank + 1.0]
        assert [stored.num_reads for stored in tensors.values()] == [1 - rank] * 2 + [rank] * 2


def test_a_module_that_got_no_tensor_is_incomplete() -> None:
    assigner = WeightAssigner(Mixture(0))
    assigner.assign("mlp.norm.weight", InMemory(torch.ones(3)))
    with pytest.raises(ModelLoadError, match=r"parameters mlp\.experts\.gate_proj; they"):
        assigner.check_complete()


def test_a_tied_tensor_fills_a_further_parameter() -> None:
    values = torch.arange(24.0).view(8, 3)
    for has_head in (True, False):
        model = Tied(has_head=has_head)
        assigner = WeightAssigner(model)
        assigner.assign("embed.weight", InMemory(values))
        assigner.check_complete()
        assert torch.equal(model.embed.weight, values)
        if has_head:
            assert torch.equal(model.head.weight, values[2:4])
