"""A secret of the environment reaches what needs it, and no file and no terminal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120
KEY, CODE, TOKEN = 'marker-"A"\\1', "marker#B 2", "hf_marker_C3"
PARTS = """
import hashlib
import logging
import os
import subprocess

from inferkit.scheduler.scheduler import Scheduler


class Talking(Scheduler):
    def __init__(self, *, api_key, headers, url, note, fails=False, **kwargs):
        super().__init__(**kwargs)
        self.all, self.fails = (api_key, headers, url, note), fails
        logging.getLogger(__name__).warning("api_key=%s headers=%r url=%s note=%s", *self.all)
        print("printed", *self.all)
        subprocess.run(["printf", "child %s ", api_key], check=True)
        os.write(2, f"raw {api_key}".encode())
        print(hashlib.sha256(api_key.encode()).hexdigest())

    def schedule(self, *args, **kwargs):
        if self.fails:
            raise ValueError(f"401 for {self.all}")
        return super().schedule(*args, **kwargs)
"""
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
WORDS = [
    "model=llama",
    "model.with_ckpt=false",
    "+model.arch={" + ",".join(f"{key}:{value}" for key, value in SHAPE.items()) + "}",
    "data.limit=2",
    "scheduler.max_new_tokens=3",
    "allowed_targets=[talking]",
    "scheduler._target_=talking.Talking",
    "+scheduler.params.api_key=${oc.env:MY_API_KEY}",
    "+scheduler.params.headers={Authorization: 'Bearer ${oc.env:MY_CODE}', x: [1]}",
    "+scheduler.params.url='http://me:${oc.env:MY_CODE}@host/x'",
    "+scheduler.params.note='${oc.env:HF_TOKEN}'",
]


class Folder:
    """Where commands run; keeps all that they print."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.printed = ""

    def run(self, *words: str) -> int:
        variables = {"MY_API_KEY": KEY, "MY_CODE": CODE, "HF_TOKEN": TOKEN}
        result = subprocess.run(
            [sys.executable, "-m", "inferkit", *words],
            cwd=self.path,
            env=os.environ | variables | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        self.printed += result.stdout + result.stderr
        return result.returncode

    def leaks(self) -> list[str]:
        """Files that hold a secret, in any of the ways that it could have been written."""
        texts = {"terminal": self.printed}
        for file in self.path.rglob("*"):
            if file.is_file():
                texts[str(file.relative_to(self.path))] = file.read_text("utf-8", "replace")
        return [name for name, text in texts.items() if "marker" in text]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "talking.py").write_text(PARTS)
    return Folder(tmp_path)


def test_a_run_and_what_is_made_of_it_hold_no_secret(folder: Folder) -> None:
    assert folder.run(*WORDS, "hydra.run.dir=run") == 0, folder.printed
    run_dir = folder.path / "run"

    recorded = (run_dir / "config.resolved.yaml").read_text()
    assert "api_key: ${oc.env:MY_API_KEY}" in recorded
    log = (run_dir / "rank0.log").read_text()
    assert "api_key=<secret MY_API_KEY>" in log and "Bearer <secret MY_CODE>" in log
    output = (run_dir / "workers" / "rank0.stdout.log").read_text()
    assert "printed <secret MY_API_KEY>" in output and "child <secret MY_API_KEY>" in output
    errors = (run_dir / "workers" / "rank0.stderr.log").read_text()
    assert "raw <secret MY_API_KEY>" in errors
    assert (
        "+scheduler.params.api_key=${oc.env:MY_API_KEY}"
        in json.loads((run_dir / "provenance.json").read_text())["overrides"]
    )

    assert folder.run("replay", "run") == 0, folder.printed
    assert folder.run("explain", "run") == 0, folder.printed
    assert folder.run("report", "run") == 0, folder.printed
    assert folder.run("--cfg", "job", "--resolve", *WORDS) == 0, folder.printed
    assert folder.run("diff", "run", "+scheduler.params.api_key=${oc.env:HF_TOKEN}") == 1
    assert "<secret MY_API_KEY>" in folder.printed
    assert folder.leaks() == []


@pytest.mark.multiproc
def test_a_failure_that_quotes_a_secret_does_not_spread_it(folder: Folder) -> None:
    words = [*WORDS, "+scheduler.params.fails=true", "parallel=tp2", "hydra.run.dir=run"]

    assert folder.run(*words) == 1

    assert "ValueError: 401 for ('<secret MY_API_KEY>'" in folder.printed
    assert "\n  at talking.py:" in folder.printed
    result = json.loads((folder.path / "run" / "result.json").read_text())
    assert "<secret MY_API_KEY>" in result["error"] and "<secret MY_CODE>" in result["traceback"]
    assert folder.leaks() == []


def test_a_typed_secret_is_refused_and_leaves_nothing(folder: Folder) -> None:
    words = [text for text in WORDS if "note=" not in text]

    assert folder.run(*words, f"+scheduler.params.note={TOKEN}") == 2

    assert "scheduler.params.note=<secret HF_TOKEN>" in folder.printed
    assert "'++scheduler.params.note=${oc.env:HF_TOKEN}'" in folder.printed
    assert not (folder.path / "outputs").exists()
    assert folder.leaks() == []
