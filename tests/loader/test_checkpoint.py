"""Reading safetensors: single files, shards, and everything that can be wrong with them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from inferkit.core.errors import ModelLoadError
from inferkit.loader.checkpoint import INDEX_NAME, SafetensorsCheckpoint
from tests.loader.files import hf_tensors

Make = Callable[..., Path]


@pytest.fixture
def sharded(tiny_hf_model: Make, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tiny_hf_model("llama"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    return tmp_path / "sharded"


def assert_reads(checkpoint: SafetensorsCheckpoint, expected: dict[str, torch.Tensor]) -> None:
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.num_bytes(name) == tensor.nbytes
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


def test_a_single_file_is_read(tiny_hf_model: Make) -> None:
    folder = tiny_hf_model("qwen2")
    assert_reads(SafetensorsCheckpoint.of_folder(folder), hf_tensors(folder))


def test_shards_are_read_by_their_index(sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_reads(SafetensorsCheckpoint.of_folder(sharded), hf_tensors(sharded))


def test_shards_without_an_index_are_read(sharded: Path) -> None:
    expected = hf_tensors(sharded)
    (sharded / INDEX_NAME).unlink()
    assert_reads(SafetensorsCheckpoint.of_folder(sharded), expected)


def test_files_that_are_not_of_the_model_are_left_alone(
    tiny_hf_model: Make, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_hf_model("llama"), folder)
    expected = hf_tensors(folder)
    save_file({"adapter": torch.zeros(1)}, folder / "adapter_model.safetensors")
    assert_reads(SafetensorsCheckpoint.of_folder(folder), expected)


def test_an_absent_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"files that are not there: {shard.name}; download"):
        SafetensorsCheckpoint.of_folder(sharded)


def test_a_tensor_that_only_the_index_has_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_NAME).read_text())
    index["weight_map"]["ghost.weight"] = next(iter(index["weight_map"].values()))
    (sharded / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"do not hold: ghost\.weight; download"):
        SafetensorsCheckpoint.of_folder(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no index of a sharded model"),
        ("{}", "is no index of a sharded model"),
        ('{"weight_map": {}}', "must name .*not nothing"),
        ('{"weight_map": {"a": "../other.safetensors"}}', r"not \.\./other\.safetensors"),
        ('{"weight_map": {"a": "weights.bin"}}', r"not weights\.bin"),
    ],
)
def test_a_faulty_index_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(ModelLoadError, match=message):
        SafetensorsCheckpoint.of_folder(tmp_path)


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"weight": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"weight is in both a\.safetensors and b\.safetensors"
    ):
        SafetensorsCheckpoint.of_folder(tmp_path)


@pytest.mark.parametrize("num_bytes", [3, 40, -1])
def test_a_file_that_was_cut_short_is_named(num_bytes: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(100)}, file)
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(
        ModelLoadError, match=r"model\.safetensors (is no safetensors file|has \d+)"
    ):
        SafetensorsCheckpoint.of_folder(tmp_path)


@pytest.mark.parametrize(
    "header", [b"[1]", b"{", b'{"a": 1}', b'{"a": {"data_offsets": []}}', b"\xff" * 8]
)
def test_a_damaged_header_is_named(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelLoadError, match="has a damaged safetensors header"):
        SafetensorsCheckpoint.of_folder(tmp_path)


def test_offsets_must_fit_the_shape(tmp_path: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelLoadError, match=r"tensor a in .* has 8 bytes for \(3,\)"):
        SafetensorsCheckpoint.of_folder(tmp_path)


def test_a_quantised_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="w in .* has type F8_E4M3; allowed are F64, F32, F16"):
        SafetensorsCheckpoint.of_folder(tmp_path)


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(
        ModelLoadError, match=r"pickled weights only \(pytorch_model\.bin\).*convert"
    ):
        SafetensorsCheckpoint.of_folder(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no \*\.safetensors file"):
        SafetensorsCheckpoint.of_folder(tmp_path)


def test_identity_tells_models_apart_without_reading_weights(sharded: Path, tmp_path: Path) -> None:
    identity = SafetensorsCheckpoint.of_folder(sharded).identity()
    assert [entry["name"] for entry in identity] == sorted(
        file.name for file in sharded.glob("*.safetensors")
    )
    assert SafetensorsCheckpoint.of_folder(sharded).identity() == identity
    for name, shape in (("a", (2, 3)), ("b", (3, 2))):
        (tmp_path / name).mkdir()
        save_file({"w": torch.zeros(shape)}, tmp_path / name / "model.safetensors")
    first, second = (
        SafetensorsCheckpoint.of_folder(tmp_path / name).identity()[0] for name in ("a", "b")
    )
    assert first["size"] == second["size"]
    assert first["header_sha256"] != second["header_sha256"]
