"""What `model.path` may name, and what a source tells about the model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from inferkit.core.errors import ConfigError, ModelLoadError
from inferkit.loader.checkpoint import SafetensorsCheckpoint
from inferkit.loader.gguf import GGUFCheckpoint
from inferkit.loader.source import resolve_source
from inferkit.models.dense.arch import parse_arch
from tests.loader.files import write_gguf

Make = Callable[..., Path]


@pytest.fixture
def folder(tiny_hf_model: Make, tmp_path: Path) -> Path:
    shutil.copytree(tiny_hf_model("llama"), tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_is_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    source = resolve_source("model")
    assert source.directory == folder
    assert source.config == json.loads((folder / "config.json").read_text())
    assert isinstance(source.checkpoint, SafetensorsCheckpoint)


def test_a_gguf_file_is_a_model(folder: Path) -> None:
    source = resolve_source(str(write_gguf(folder, folder / "m.gguf")))
    assert source.directory == folder
    assert source.config["model_type"] == "llama"
    assert source.generation_config == {}
    assert isinstance(source.checkpoint, GGUFCheckpoint)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", r"model\.path=/no/such/folder is not there \(looked in /no/such\);"),
        (
            "missing.gguf",
            r"model\.path=missing\.gguf is not there .*allowed are a Hugging Face mod",
        ),
        ("a/b/c", r"model\.path=a/b/c is not there"),
        ("./model", r"model\.path=\./model is not there"),
        ("", r"model\.path= .*allowed are"),
    ],
)
def test_what_is_nothing_is_named(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        resolve_source(path)


def test_a_file_that_is_no_gguf_is_named(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"is a file, but no \.gguf file; allowed are"):
        resolve_source(str(folder / "model.safetensors"))


def test_a_folder_without_config_is_named(folder: Path) -> None:
    write_gguf(folder, folder / "m.gguf")
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no config\.json; .* or one of its files m\.g"):
        resolve_source(str(folder))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_config_is_named(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json (is no JSON|holds no JSON object)"):
        resolve_source(str(folder))


def test_random_weights_need_no_checkpoint(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert resolve_source(str(folder), with_weights=False).config["model_type"] == "llama"
    with pytest.raises(ModelLoadError, match=r"holds no \*\.safetensors"):
        resolve_source(str(folder))


def test_eos_is_the_union_of_all_places(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [5, 6]}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    source = resolve_source(str(folder))
    assert source.eos_token_ids() == {5, 6, 7}
    assert source.eos_token_ids(source.load_tokenizer()) == {2, 5, 6, 7}
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert resolve_source(str(folder)).eos_token_ids() == {9}


def test_code_in_the_folder_is_never_run(folder: Path) -> None:
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    for name, entry in (
        ("config.json", {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    ):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": entry}))
    source = resolve_source(str(folder))
    try:
        assert source.load_tokenizer()("a")["input_ids"]
    except ModelLoadError as error:
        assert "no tokenizer could be loaded" in str(error)
    assert not ran.exists()


def test_a_folder_without_a_tokenizer_is_named(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelLoadError, match=r"no tokenizer could be loaded .*tokenizer\.json"):
        resolve_source(str(folder)).load_tokenizer()


def test_identity_names_the_files(folder: Path) -> None:
    identity = resolve_source(str(folder)).identity()
    assert [entry["name"] for entry in identity["weights"]] == ["model.safetensors"]
    assert set(identity["configs"]) == {"config.json", "generation_config.json"}
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    changed = resolve_source(str(folder)).identity()
    assert changed["configs"]["config.json"] != identity["configs"]["config.json"]
    assert changed["weights"] == identity["weights"]
    gguf_file = write_gguf(folder, folder / "m.gguf")
    assert resolve_source(str(gguf_file)).identity()["weights"][0]["name"] == "m.gguf"


def test_keys_of_a_file_may_be_unknown_and_are_named_with_it(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"is_llama_config": True}))
    assert parse_arch(resolve_source(str(folder)).config).hidden_size == 64
    file.write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match=f"hidden_act in {file}='gelu'"):
        parse_arch(resolve_source(str(folder)).config)
