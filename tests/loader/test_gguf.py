"""GGUF files against the Hugging Face folders that they were made from, and transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

from inferkit.core.errors import ModelLoadError
from inferkit.layers.rotary import llama3_inv_freq, theta_powers
from inferkit.loader.default_loader import DefaultModelLoader
from inferkit.loader.gguf import GGUFCheckpoint, hf_name
from inferkit.loader.source import resolve_source
from inferkit.models.dense.arch import parse_arch
from tests.loader.files import gguf_name, hf_tensors, make_model, unpacked, write_gguf

Make = Callable[..., Path]
QType = gguf.GGMLQuantizationType


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("qtype", "atol"), [(QType.F32, 0.0), (QType.F16, 1e-3), (QType.BF16, 1e-2), (QType.Q8_0, 1e-2)]
)
def test_tensors_are_those_of_the_model(
    family: str, qtype: QType, atol: float, tiny_hf_model: Make, tmp_path: Path
) -> None:
    folder = tiny_hf_model(family)
    source = resolve_source(str(write_gguf(folder, tmp_path / "m.gguf", qtype=qtype)))
    model = make_model(source.config)
    DefaultModelLoader().load(model, source)
    loaded, expected = unpacked(model), hf_tensors(folder)
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0.0, atol=atol)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_shape_is_that_of_the_model(family: str, tiny_hf_model: Make, tmp_path: Path) -> None:
    for tied in (False, True):
        folder = tiny_hf_model(family, tie_word_embeddings=tied)
        file = write_gguf(folder, tmp_path / f"{tied}.gguf")
        config = resolve_source(str(file)).config
        saved = json.loads((folder / "config.json").read_text())
        arch = parse_arch(config, origin=str(file))
        expected = parse_arch(saved, origin="config.json")
        assert arch.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
        changes = {"rms_norm_eps": arch.rms_norm_eps}
        assert arch == type(expected)(**{**vars(expected), **changes})


def test_a_quantised_file_gives_what_transformers_gives(
    tiny_hf_model: Make, tmp_path: Path
) -> None:
    file = write_gguf(tiny_hf_model("llama"), tmp_path / "m.gguf", qtype=QType.Q8_0)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).state_dict()
    checkpoint = GGUFCheckpoint(file)
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor), name


@pytest.mark.parametrize("qtype", [QType.F32, QType.BF16, QType.Q8_0])
@pytest.mark.parametrize("index", [(slice(5, 21),), (slice(None), slice(3, 40)), (slice(8, 8),)])
def test_a_part_costs_its_rows(
    qtype: QType, index: tuple[slice, ...], tiny_hf_model: Make, tmp_path: Path
) -> None:
    folder = tiny_hf_model("llama", attention_bias=True)
    file = write_gguf(folder, tmp_path / "m.gguf", qtype=qtype)
    whole, parts = GGUFCheckpoint(file), GGUFCheckpoint(file)
    for name in whole.names():
        expected = whole.read(name)
        num_slices = min(len(index), expected.dim())
        before = parts.num_bytes_read
        part = parts.read(name, *index[:num_slices])
        assert torch.equal(part, expected[index[:num_slices]]), name
        if expected.dim() == 2:
            num_rows = len(range(*index[0].indices(len(expected))))
            read = parts.num_bytes_read - before
            assert read == whole.num_bytes(name) * num_rows // len(expected), name
    assert whole.num_bytes_read == sum(whole.num_bytes(name) for name in whole.names())


def test_the_tokenizer_comes_from_the_file(tiny_hf_model: Make, tmp_path: Path) -> None:
    folder = tiny_hf_model("llama")
    source = resolve_source(str(write_gguf(folder, tmp_path / "m.gguf")))
    ours, theirs = source.load_tokenizer(), resolve_source(str(folder)).load_tokenizer()
    assert ours.is_fast
    for text in ("Hello, world", "<|im_start|>user\n12 + 3<|im_end|>", "naïve 中文"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    assert ours.chat_template == theirs.chat_template
    assert source.eos_token_ids(ours) == {2}


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({}, {"rope_type": "default"}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 512,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
    ],
)
def test_rope_scaling_is_read(
    metadata: dict[str, Any], scaling: dict[str, Any], tiny_hf_model: Make, tmp_path: Path
) -> None:
    file = write_gguf(tiny_hf_model("llama"), tmp_path / "m.gguf", metadata=metadata)
    config = GGUFCheckpoint(file).config()
    assert config["rope_parameters"] == {"rope_theta": 10_000.0, **scaling}
    parse_arch(config, origin="m.gguf")


def test_longrope_factors_are_read(tiny_hf_model: Make, tmp_path: Path) -> None:
    metadata = {
        "llama.rope.scaling.type": "longrope",
        "llama.rope.scaling.attn_factor": 1.25,
        "llama.rope.scaling.original_context_length": 512,
    }
    short, long = np.arange(1, 9, dtype=np.float32), np.arange(2, 10, dtype=np.float32)
    extra = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    folder = tiny_hf_model("llama")
    file = write_gguf(folder, tmp_path / "m.gguf", metadata=metadata, extra=extra)
    checkpoint = GGUFCheckpoint(file)
    scaling = parse_arch(checkpoint.config(), origin="m.gguf").rope_scaling
    assert scaling is not None
    assert scaling.short_factor == tuple(short)
    assert scaling.long_factor == tuple(long)
    assert scaling.attention_factor == 1.25
    assert scaling.original_max_position_embeddings == 512
    assert set(checkpoint.names()) == set(hf_tensors(folder))
    file = write_gguf(folder, tmp_path / "without.gguf", metadata=metadata)
    with pytest.raises(ModelLoadError, match=r"no tensor rope_factors_short\.weight"):
        GGUFCheckpoint(file).config()


def test_the_factors_of_llama_3_are_recognised(tiny_hf_model: Make, tmp_path: Path) -> None:
    folder = tiny_hf_model("llama", rope_theta=500_000.0)
    arch = parse_arch(
        json.loads((folder / "config.json").read_text())
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
        origin="config.json",
    )
    assert arch.rope_scaling is not None
    inv_freq = theta_powers(500_000.0, arch.head_dim).reciprocal()
    factors = (inv_freq / llama3_inv_freq(inv_freq, arch.rope_scaling)).numpy()
    extra = {"rope_freqs.weight": factors}
    file = write_gguf(folder, tmp_path / "m.gguf", extra=extra)
    read = parse_arch(GGUFCheckpoint(file).config(), origin="m.gguf")
    assert read.rope_theta == 500_000.0
    assert read.rope_scaling == arch.rope_scaling
    extra = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    file = write_gguf(folder, tmp_path / "ones.gguf", extra=extra)
    assert GGUFCheckpoint(file).config()["rope_parameters"]["rope_type"] == "default"
    extra = {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    file = write_gguf(folder, tmp_path / "other.gguf", extra=extra)
    with pytest.raises(ModelLoadError, match="is not the scaling of Llama 3.1"):
        GGUFCheckpoint(file).config()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"split.count": 3}, "is one of 3 parts; join them"),
        ({"llama.rope.scaling.type": "su"}, "rope scaling of type 'su'"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0},
            r"of type 'yarn' \(attn_factor 2\.0\)",
        ),
        ({"llama.rope.scaling.type": "linear"}, r"no metadata llama\.rope\.scaling\.factor"),
    ],
)
def test_what_is_not_understood_is_named(
    metadata: dict[str, Any], message: str, tiny_hf_model: Make, tmp_path: Path
) -> None:
    file = write_gguf(tiny_hf_model("llama"), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ModelLoadError, match=message):
        GGUFCheckpoint(file).config()


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gpt2")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelLoadError, match="architecture='gpt2'; allowed are llama, qwen2, qwen3"
    ):
        GGUFCheckpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("size", [0, 4, 100, 3000, -64])
def test_a_damaged_file_is_named(size: int, tiny_hf_model: Make, tmp_path: Path) -> None:
    file = write_gguf(tiny_hf_model("llama"), tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"m\.gguf is no GGUF file, or it is damaged"):
        GGUFCheckpoint(file)


def test_identity_covers_the_metadata(tiny_hf_model: Make, tmp_path: Path) -> None:
    folder = tiny_hf_model("llama")
    metadata: dict[str, Any] = {"general.size_label": "tiny"}
    first = GGUFCheckpoint(write_gguf(folder, tmp_path / "m.gguf", metadata=metadata)).identity()
    metadata = {"general.size_label": "tony"}
    second = GGUFCheckpoint(write_gguf(folder, tmp_path / "m.gguf", metadata=metadata)).identity()
    assert first[0]["name"] == "m.gguf"
    assert first[0]["size"] == second[0]["size"]
    assert first[0]["sha256"] != second[0]["sha256"]


def test_names_of_both_worlds_match(tiny_hf_model: Make) -> None:
    for family in ("llama", "qwen2", "qwen3"):
        for name in hf_tensors(tiny_hf_model(family)):
            assert hf_name(gguf_name(name)) == name
    assert hf_name("blk.0.ffn_gate_inp.weight") == "blk.0.ffn_gate_inp.weight"


def test_the_reader_of_transformers_agrees_on_the_shape(
    tiny_hf_model: Make, tmp_path: Path
) -> None:
    file = write_gguf(tiny_hf_model("qwen3"), tmp_path / "m.gguf")
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name)
    ours = GGUFCheckpoint(file).config()
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "vocab_size"):
        assert ours[key] == getattr(theirs, key)
