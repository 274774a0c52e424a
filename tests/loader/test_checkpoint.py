"""Reading safetensors: single files, shards, and everything that can be wrong with them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from inferkit.core.errors import ModelLoadError
from inferkit.loader.checkpoint import INDEX_NAME, CheckpointTensor, SafetensorsCheckpoint
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
        assert checkpoint.dtype(name) == tensor.dtype
        assert checkpoint.num_bytes(name) == tensor.nbytes
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


PARTS = [
    ((), 1.0),
    ((slice(None),), 1.0),
    ((slice(6, 12),), 1 / 4),
    ((slice(5, 5),), 0.0),
    ((slice(18, 99),), 1 / 4),
    ((slice(None), slice(4, 6)), 1 / 4),
    ((slice(0, 12), slice(None), slice(3, 6)), 1 / 4),
    ((slice(2, 5), slice(1, 3), slice(5, 6)), 3 / 24 * 2 / 8 * 1 / 6),
]
"""Parts of a tensor [24, 8, 6], and the share that each is."""


@pytest.mark.parametrize(("index", "share"), PARTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_part_is_read_and_not_a_byte_more(
    index: tuple[slice, ...], share: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    whole = torch.randn(24, 8, 6).to(dtype)
    save_file({"first": torch.ones(3), "w": whole, "z": torch.ones(5)}, tmp_path / "a.safetensors")
    checkpoint = SafetensorsCheckpoint.of_folder(tmp_path)
    part = checkpoint.read("w", *index)
    assert part.dtype == dtype
    assert torch.equal(part, whole[index])
    assert checkpoint.num_bytes_read == part.nbytes == round(share * whole.nbytes)
    checkpoint.read("first")
    assert checkpoint.num_bytes_read == part.nbytes + 12


@pytest.mark.parametrize("dim", [0, 1])
def test_each_of_four_ranks_reads_a_quarter(dim: int, tmp_path: Path) -> None:
    whole = torch.randn(64, 32)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    size = whole.shape[dim] // 4
    parts = []
    for rank in range(4):
        checkpoint = SafetensorsCheckpoint.of_folder(tmp_path)
        stored = CheckpointTensor(checkpoint, "w")
        assert stored.shape == (64, 32)
        share = slice(rank * size, (rank + 1) * size)
        parts.append(stored.read(*[slice(None)] * dim, share))
        assert checkpoint.num_bytes_read == whole.nbytes // 4
    assert torch.equal(torch.cat(parts, dim), whole)


def test_the_kernel_is_asked_for_no_more_than_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.zeros(64, 32)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint.of_folder(tmp_path)
    asked: list[int] = []
    preadv = os.preadv

    def count(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.extend(len(buffer) for buffer in buffers)
        return preadv(descriptor, [buffer[:100] for buffer in buffers], offset)

    monkeypatch.setattr(os, "preadv", count)
    assert torch.equal(checkpoint.read("w", slice(0, 8)), torch.zeros(8, 32))
    assert asked == list(range(1024, 0, -100))  # goes on where a call gave less
    asked.clear()
    checkpoint.read("w", slice(None), slice(3, 5))
    assert asked == [8] * 64


def test_a_scalar_and_an_empty_tensor_are_read(tmp_path: Path) -> None:
    tensors = {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_reads(SafetensorsCheckpoint.of_folder(tmp_path), tensors)


def test_a_file_that_shrank_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(64, 32)}, file)
    checkpoint = SafetensorsCheckpoint.of_folder(tmp_path)
    os.truncate(file, file.stat().st_size - 1)
    assert torch.equal(checkpoint.read("w", slice(0, 63)), torch.ones(63, 32))
    for index in ((), (slice(60, 64),), (slice(None), slice(31, 32))):
        with pytest.raises(ModelLoadError, match=r"model\.safetensors ends within w; download"):
            checkpoint.read("w", *index)
    file.unlink()
    with pytest.raises(ModelLoadError, match=r"cannot read w from .*No such file"):
        checkpoint.read("w")


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
    message = "w in .* has type F8_E4M3; allowed are F64, F32, F16, BF16 without a quantization_c"
    with pytest.raises(ModelLoadError, match=message):
        SafetensorsCheckpoint.of_folder(tmp_path)


def test_codes_are_read_where_they_are_allowed(tmp_path: Path) -> None:
    tensors = {
        "f8": torch.arange(24).view(6, 4).to(torch.float8_e4m3fn),
        "u8": torch.arange(24, dtype=torch.uint8).view(6, 4),
        "i4": torch.zeros(2, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="i4 in .* has type I32; .* BF16, F8_E4M3, U8$"):
        SafetensorsCheckpoint.of_folder(tmp_path, quantised=True)
    del tensors["i4"]
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint.of_folder(tmp_path, quantised=True)
    for name, tensor in tensors.items():
        part = checkpoint.read(name, slice(2, 4), slice(1, 3))
        assert part.dtype == checkpoint.dtype(name) == tensor.dtype
        assert torch.equal(part.view(torch.uint8), tensor[2:4, 1:3].view(torch.uint8))
    assert checkpoint.num_bytes_read == 8


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(
        ModelLoadError, match=r"pickled weights only \(pytorch_model\.bin\).*convert"
    ):
        SafetensorsCheckpoint.of_folder(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no \*\.safetensors file"):
        SafetensorsCheckpoint.of_folder(tmp_path)


def test_identity_tells_models_apart(sharded: Path, tmp_path: Path) -> None:
    identity = SafetensorsCheckpoint.of_folder(sharded).identity()
    assert [entry["name"] for entry in identity] == sorted(
        file.name for file in sharded.glob("*.safetensors")
    )
    assert SafetensorsCheckpoint.of_folder(sharded).identity() == identity
    for name, weights in (("a", torch.zeros(2, 3)), ("b", torch.ones(2, 3))):
        (tmp_path / name).mkdir()
        save_file({"w": weights}, tmp_path / name / "model.safetensors")
    first, second = (
        SafetensorsCheckpoint.of_folder(tmp_path / name).identity()[0] for name in ("a", "b")
    )
    assert first["size"] == second["size"]
    assert first["sha256"] != second["sha256"]
