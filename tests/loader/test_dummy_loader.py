"""Random weights depend on name and seed only, and keep activations alive."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inferkit.layers.weights import StoredTensor
from inferkit.loader.dummy_loader import CHUNK_ELEMENTS, DummyModelLoader, RandomTensor, make_tensor
from inferkit.loader.source import resolve_source
from tests.loader.files import make_model, unpacked

Make = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_parameter_is_filled_by_its_checkpoint_name(family: str, tiny_hf_model: Make) -> None:
    config = resolve_source(str(tiny_hf_model(family))).config
    model = make_model(config)
    calls: list[tuple[int, int]] = []
    DummyModelLoader(seed=3).load(
        model, None, progress=lambda done, total: calls.append((done, total))
    )
    assert calls[-1][0] == calls[-1][1] > 0
    for name, tensor in unpacked(model).items():
        expected = make_tensor(name, tuple(tensor.shape), seed=3, dtype=torch.float32)
        assert torch.equal(tensor, expected), name


def test_seeds_and_names_give_different_tensors_of_the_right_size() -> None:
    def make(name: str, seed: int) -> torch.Tensor:
        return make_tensor(name, (256, 400), seed=seed, dtype=torch.float32)

    tensors = [make("a.weight", 0), make("a.weight", 1), make("b.weight", 0)]
    for tensor in tensors:
        assert abs(float(tensor.std()) - 0.05) < 1e-3
        assert abs(float(tensor.mean())) < 1e-3
    for first, second in ((0, 1), (0, 2), (1, 2)):
        pair = torch.stack((tensors[first].flatten(), tensors[second].flatten()))
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.02


def test_norms_are_about_one_and_biases_about_zero() -> None:
    norm = make_tensor("norm.weight", (1000,), seed=0, dtype=torch.float32)
    bias = make_tensor("q_proj.bias", (1000,), seed=0, dtype=torch.float32)
    assert abs(float(norm.mean()) - 1.0) < 0.01
    assert 0.0 < float(norm.std()) < 0.1
    assert abs(float(bias.mean())) < 0.01
    assert 0.0 < float(bias.std()) < 0.1


def test_another_type_gives_the_same_values_rounded() -> None:
    shape = (3, CHUNK_ELEMENTS // 2)
    full = make_tensor("a", shape, seed=0, dtype=torch.float32)
    assert torch.equal(make_tensor("a", shape, seed=0, dtype=torch.bfloat16), full.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_have_the_values_of_the_whole(dtype: torch.dtype) -> None:
    whole = make_tensor("x.weight", (6, 8, 10), seed=1, dtype=dtype)
    for index in ((), (slice(2, 4),), (slice(None), slice(6, 99)), (slice(1, 2),) * 3):
        stored = RandomTensor("x.weight", (6, 8, 10), 1, dtype)
        assert stored.shape == tuple(whole.shape)
        assert torch.equal(stored.read(*index), whole[index])
        assert torch.equal(stored.read(slice(0, 1)), whole[:1])


class Experts(nn.Module):
    """Holds one expert of four."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(5, 3))

    def load_tensor(self, name: str, stored: StoredTensor) -> None:
        if name == "2.up_proj.weight":
            self.up_proj.data.copy_(stored.read())


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        return {f"experts.{idx}.up_proj.weight": (5, 3) for idx in range(4)}


def test_a_tensor_that_nobody_reads_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make(name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(name)
        return make_tensor(name, *args, **kwargs)

    monkeypatch.setattr("inferkit.loader.dummy_loader.make_tensor", make)
    model, done = Mixture(), []
    DummyModelLoader().load(model, None, progress=lambda *counts: done.append(counts))
    assert made == ["experts.2.up_proj.weight"]
    assert done[-1] == (240, 240)


def test_another_process_makes_the_same_tensor() -> None:
    code = (
        "import torch; from inferkit.loader.dummy_loader import make_tensor; "
        "tensor = make_tensor('x.weight', (50, 60), seed=7, dtype=torch.float32); "
        "print(tensor.double().sum().item())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    here = make_tensor("x.weight", (50, 60), seed=7, dtype=torch.float32).double().sum().item()
    assert float(done.stdout) == here
