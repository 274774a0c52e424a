"""Hugging Face ids, against a local server; in processes of their own, since the hub's client
reads its environment when it is imported."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.loader.hub_server import GATED, REPO, HubServer, running

Make = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]
CODE = """
import json, sys
from inferkit.core.errors import ModelLoadError
from inferkit.loader.source import resolve_source

def resolve(path, with_weights):
    calls = []
    try:
        source = resolve_source(
            path,
            with_weights=with_weights,
            progress=lambda done, total: calls.append((done, total)),
        )
    except ModelLoadError as error:
        return {"error": str(error)}
    files = sorted(path.name for path in source.directory.iterdir())
    tokens = source.load_tokenizer()("hi")["input_ids"]
    result = {"files": files, "model_type": source.config["model_type"], "tokens": tokens}
    return result | {"calls": calls}

print(json.dumps([resolve(path, sys.argv[1] == "weights") for path in sys.argv[2:]]))
"""


@dataclass
class Hub:
    server: HubServer
    home: Path
    endpoint: str

    def resolve(self, *, weights: bool = True, **environ: str) -> dict[str, Any]:
        """What `resolve_source` gives for the model in a new process."""
        return self.resolve_all([REPO], weights=weights, **environ)[0]

    def resolve_all(
        self, paths: list[str], *, weights: bool = True, **environ: str
    ) -> list[dict[str, Any]]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", CODE, "weights" if weights else "none", *paths],
            env={**kept, "HF_ENDPOINT": self.endpoint, "HF_HOME": str(self.home), **environ},
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        results: list[dict[str, Any]] = json.loads(done.stdout)
        return results


@pytest.fixture
def hub(tiny_hf_model: Make, tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    shutil.copytree(tiny_hf_model("qwen3"), folder)
    for name in ("pytorch_model.bin", "modeling_evil.py", "consolidated.safetensors"):
        (folder / name).write_bytes(b"never fetched")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"never fetched")
    with running(folder) as server:
        yield Hub(server, tmp_path / "home", server.url)


def test_an_id_is_downloaded_and_then_used_without_a_network(hub: Hub) -> None:
    first = hub.resolve()
    assert first["model_type"] == "qwen3"
    assert first["tokens"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(first["files"])
    wanted = {"pytorch_model.bin", "modeling_evil.py", "consolidated.safetensors", "original"}
    assert not wanted & set(first["files"])
    assert not [path for path in hub.server.requested if path.endswith((".bin", ".py"))]
    size = len(hub.server.files["model.safetensors"])
    assert first["calls"][-1][0] >= size
    assert all(done <= total for done, total in first["calls"])

    hub.server.requested.clear()
    assert hub.resolve(HF_HUB_OFFLINE="1")["files"] == first["files"]
    assert hub.server.requested == []
    hub.endpoint = "http://127.0.0.1:9"
    assert hub.resolve()["files"] == first["files"]


def test_random_weights_download_no_weights(hub: Hub) -> None:
    result = hub.resolve(weights=False)
    assert "config.json" in result["files"]
    assert not [path for path in hub.server.requested if path.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("environ", "endpoint", "why"),
    [
        ({"HF_HUB_OFFLINE": "1"}, None, "HF_HUB_OFFLINE is set"),
        ({}, "http://127.0.0.1:9", "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_what_is_not_here_and_not_reachable_is_named(
    environ: dict[str, str], endpoint: str | None, why: str, hub: Hub
) -> None:
    hub.endpoint = endpoint or hub.endpoint
    error = hub.resolve(**environ)["error"]
    assert error.startswith(f"model.path={REPO} is no folder here, {why}, and ")
    assert "give its folder" in error
    assert "\n" not in error


def test_an_id_that_cannot_be_had_is_named(hub: Hub) -> None:
    cases = {
        "someone/nothing": f"is no folder here and no model on {hub.endpoint}",
        "nothing": f"is no folder here and no model on {hub.endpoint}",
        GATED: "needs a login that was granted access; run `hf auth login`",
        "some--one/name": "no valid Hugging Face id",
    }
    for (path, message), result in zip(cases.items(), hub.resolve_all(list(cases)), strict=True):
        assert result["error"].startswith(f"model.path={path} ")
        assert message in result["error"]
        assert "\n" not in result["error"]


def test_a_model_of_pickles_only_is_refused(hub: Hub) -> None:
    del hub.server.files["model.safetensors"]
    assert "holds no *.safetensors file" in hub.resolve()["error"]
