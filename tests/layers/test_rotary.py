"""Rotary tables against transformers, for every scaling type, also past the trained context."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from inferkit.core.hf_config import ConfigReader
from inferkit.layers.rope_config import read_rope
from inferkit.layers.rotary import RotaryEmbedding

HEAD_DIM = 32
TRAINED = 64
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn_bounds": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 48,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.25,
    },
    "yarn_without_factor": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0 + 0.01 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + 0.3 * i for i in range(HEAD_DIM // 2)],
    },
    "longrope_attention_factor": {
        "rope_type": "longrope",
        "attention_factor": 1.1,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": [2.0] * (HEAD_DIM // 2),
    },
}


def pair_of(scaling: dict[str, Any], theta: float) -> tuple[RotaryEmbedding, LlamaRotaryEmbedding]:
    rope = {**scaling, "rope_theta": theta}
    reader = ConfigReader({"rope_parameters": dict(rope)})
    rope_theta, rope_scaling = read_rope(reader, head_dim=HEAD_DIM, max_position_embeddings=TRAINED)
    reader.raise_faults()
    ours = RotaryEmbedding(
        head_dim=HEAD_DIM,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=TRAINED,
    )
    config = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=TRAINED,
        rope_parameters=dict(rope),
    )
    return ours, LlamaRotaryEmbedding(config)


def reference(rotary: LlamaRotaryEmbedding, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """cos and sin of transformers as [T, D/2]; it stores both halves of a head, which are equal."""
    cos, sin = rotary(torch.empty(0, dtype=torch.float32), positions[None])
    return cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_of_a_prompt_equal_transformers(name: str, theta: float) -> None:
    ours, theirs = pair_of(SCALINGS[name], theta)
    # Within the trained context; longrope counts from its own, shorter one.
    length = 16 if name.startswith("longrope") else TRAINED
    positions = torch.arange(length)
    cos, sin = ours(positions)
    expected_cos, expected_sin = reference(theirs, positions)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == (length, HEAD_DIM // 2)
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(cos, expected_cos, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(sin, expected_sin, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", ["default", "linear", "yarn"])
def test_tables_equal_transformers_bit_for_bit_at_far_positions(name: str) -> None:
    ours, theirs = pair_of(SCALINGS[name], 1_000_000.0)
    positions = torch.tensor([0, 1, 8191, 131071])
    for table, expected in zip(ours(positions), reference(theirs, positions), strict=True):
        assert torch.equal(table, expected)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_tables_equal_transformers_when_the_output_grows_past_the_context(name: str) -> None:
    ours, theirs = pair_of(SCALINGS[name], 10_000.0)
    reference(theirs, torch.arange(10))
    positions = torch.arange(10, 2 * TRAINED)
    steps = [reference(theirs, positions[i : i + 1]) for i in range(len(positions))]
    for index, table in enumerate(ours(positions)):
        expected = torch.cat([step[index] for step in steps])
        torch.testing.assert_close(table, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_prompt_length_gives_the_tables_of_a_long_prompt(name: str) -> None:
    ours, theirs = pair_of(SCALINGS[name], 10_000.0)
    positions = torch.arange(3 * TRAINED)
    tables = ours(positions, torch.full_like(positions, len(positions)))
    for table, expected in zip(tables, reference(theirs, positions), strict=True):
        torch.testing.assert_close(table, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", SCALINGS)
def test_a_position_has_one_angle_in_every_batch(name: str) -> None:
    ours, _ = pair_of(SCALINGS[name], 10_000.0)
    whole = ours(torch.arange(2 * TRAINED))
    for start, end in ((0, 1), (5, 40), (100, 128)):
        for table, chunk in zip(whole, ours(torch.arange(start, end)), strict=True):
            torch.testing.assert_close(chunk, table[start:end], rtol=0.0, atol=1e-5)


def test_from_arch_takes_the_fields_of_an_architecture() -> None:
    class Arch:
        head_dim = 8
        rope_theta = 100.0
        rope_scaling = None
        max_position_embeddings = 32

    rotary = RotaryEmbedding.from_arch(Arch())
    cos, sin = rotary(torch.tensor([3]))
    angles = torch.tensor([[3.0 * 100.0 ** (-2 * i / 8) for i in range(4)]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_a_checkpoint_holds_no_rotary_tables() -> None:
    ours, _ = pair_of(SCALINGS["longrope"], 10_000.0)
    assert ours.state_dict() == {}
