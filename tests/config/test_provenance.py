import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from inferkit.config.compose import load_config
from inferkit.config.provenance import (
    PROVENANCE_FILE,
    RESOLVED_FILE,
    config_hash,
    environment,
    git_state,
    package_versions,
    record,
    write_json,
    write_run,
)


def read(run_dir: Path) -> dict[str, object]:
    return dict(json.loads((run_dir / PROVENANCE_FILE).read_text("utf-8")))


def test_write_run_holds_what_a_number_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    cfg = load_config(["data.seed=7"])

    write_run(tmp_path, cfg, command="inferkit data.seed=7", overrides=["data.seed=7"], extra=1)

    facts = read(tmp_path)
    assert facts["overrides"] == ["data.seed=7"]
    assert facts["command"] == "inferkit data.seed=7"
    assert facts["seed"] == 7
    assert facts["config_hash"] == config_hash(cfg)
    assert facts["extra"] == 1
    assert {"versions", "git", "environment", "host", "python", "started_at"} <= set(facts)
    variables = facts["environment"]
    assert isinstance(variables, dict)
    assert variables["OMP_NUM_THREADS"] == "2"
    assert "hf_secret" not in (tmp_path / PROVENANCE_FILE).read_text()
    resolved = yaml.safe_load((tmp_path / RESOLVED_FILE).read_text())
    assert resolved["scheduler"]["batch_size"] == 32
    assert resolved["model"]["dtype"] == "bfloat16"
    assert resolved["platform"]["_target_"] == "inferkit.platforms.cpu.CpuPlatform"


def test_record_merges(tmp_path: Path) -> None:
    record(tmp_path, seed=1, model={"name": "a"})
    record(tmp_path, seed=2, model={"sizes": [1]}, kv_blocks=3)

    assert read(tmp_path) == {"seed": 2, "model": {"name": "a", "sizes": [1]}, "kv_blocks": 3}


def test_files_appear_whole_and_leave_nothing_beside_them(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "x.json", {"text": "ä", "path": Path("/x")})

    assert json.loads((tmp_path / "a" / "x.json").read_text("utf-8")) == {"text": "ä", "path": "/x"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x.json"]


def test_environment_keeps_what_changes_behaviour_and_no_secret() -> None:
    variables = {
        "INFERKIT_CACHE": "/cache",
        "INFERKIT_SHARED": "hush",
        "INFERKIT_API_KEY": "k",
        "OMP_NUM_THREADS": "2",
        "HF_ENDPOINT": "http://user:pass@host:80/x",
        "HF_TOKEN": "t",
        "TORCH_LOGS": "dynamo",
        "PATH": "/bin",
        "HOME": "/root",
    }

    assert environment(variables, secrets={"INFERKIT_SHARED"}) == {
        "HF_ENDPOINT": "http://host:80/x",
        "INFERKIT_CACHE": "/cache",
        "OMP_NUM_THREADS": "2",
        "TORCH_LOGS": "dynamo",
    }


def test_config_hash_follows_the_values() -> None:
    cfg = load_config([])

    assert config_hash(cfg) == config_hash(load_config([]))
    assert config_hash(cfg) != config_hash(replace(cfg, data=replace(cfg.data, seed=1)))


def test_package_versions_name_absent_packages_too() -> None:
    versions = package_versions()

    assert versions["hydra-core"] is not None
    assert "torch_npu" in versions


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


def test_git_state(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    assert git_state(package) is None

    git(tmp_path, "init", "-q")
    (package / "a.py").write_text("x = 1\n")
    git(tmp_path, "add", "pkg")
    git(tmp_path, "commit", "-qm", "first")
    clean = git_state(package)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["is_dirty"] is False

    (package / "a.py").write_text("x = 2\n")
    dirty = git_state(package)
    assert dirty is not None
    assert dirty["changed_files"] == ["pkg/a.py"]

    installed = tmp_path / "env"
    installed.mkdir()
    (installed / "b.py").write_text("")
    assert git_state(installed) is None
