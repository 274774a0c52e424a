"""Fixtures of the configuration tests: one composed space, packages of a user's own."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferkit.config.check import Checker
from inferkit.config.space import ConfigSpace

ARCH: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "max_position_embeddings": 2048,
}


@pytest.fixture(autouse=True)
def nothing_was_fetched_before(empty_cache: Path) -> None:
    """The sizes of the embedded model are not known."""


@pytest.fixture(scope="session")
def space() -> ConfigSpace:
    """The options of conf/; what it composes must not be changed."""
    return ConfigSpace()


@pytest.fixture
def checker(space: ConfigSpace) -> Checker:
    return Checker(space)


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Factory `make_model(architecture, **keys)` of folders that hold only a config.json."""

    def make(architecture: str = "LlamaForCausalLM", **keys: Any) -> Path:
        folder = tmp_path / architecture
        folder.mkdir(exist_ok=True)
        config = {"architectures": [architecture]} | ARCH | keys
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture
def make_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Factory `make_package(name, module=source, ...)` of importable packages of a user's own."""

    def make(name: str, **modules: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        sources = {"__init__": ""} | modules
        for module, source in sources.items():
            (folder / f"{module}.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(str(tmp_path))

    return make
