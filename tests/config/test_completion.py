import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from inferkit.config.completion import asked_shell, complete
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError

VERBS = ("check", "explain", "replay")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("che", ["check"]),
        ("che model=", None),
        ("re", ["replay"]),
        ("replay ", []),
        ("check par", ["parallel.", "parallel="]),
        ("para", ["parallel.", "parallel="]),
        ("parallel=tp", ["parallel=tp1", "parallel=tp16", "parallel=tp2", "parallel=tp32"]),
        ("-m parallel=tp2,tp4", ["parallel=tp2,tp4"]),
        ("+ro", ["+role="]),
        ("ro", ["+role=", "router."]),
        ("++model.lo", ["++model.loader."]),
        ("~sch", ["~scheduler="]),
        ("+role=pre", ["+role=prefill"]),
        ("+experiment=qwen3_8b", ["+experiment=qwen3_8b_tp1", "+experiment=qwen3_8b_tp2"]),
        ("scheduler.batch", ["scheduler.batch_size="]),
        ("scheduler.num", []),
        ("+role=decode scheduler.num", ["scheduler.num_reserved_decode_tokens="]),
        ("scheduler.batch_size=", ["scheduler.batch_size=0"]),
        ("model.dtype=", ["model.dtype=bfloat16", "model.dtype=float16", "model.dtype=float32"]),
        ("engine.warm_up=f", ["engine.warm_up=false"]),
        ("'model.loader.p", ["model.loader.params."]),
        ("disagg/tr", ["disagg/transfer="]),
        ("hydra/la", ["hydra/launcher="]),
        ("hydra.run.", ["hydra.run.dir="]),
        ("--re", ["--resolve"]),
        ("--no", []),
        ("no_such_group=", []),
        ("parallel=nothing scheduler.b", ["scheduler.batch_size="]),
    ],
)
def test_what_is_offered(space: ConfigSpace, typed: str, offered: list[str] | None) -> None:
    found = complete(f"inferkit {typed}", space, VERBS)
    if offered is None:
        assert "check" not in found
    elif typed == "parallel=tp":
        assert set(offered) <= set(found)
    else:
        assert found == offered
    assert complete(f"python -m inferkit {typed}", space, VERBS) == found


def flags_of(verb: str) -> dict[str, tuple[str, ...] | None]:
    flags: dict[str, dict[str, tuple[str, ...] | None]] = {
        "replay": {"--output": ()},
        "explain": {"--format": ("json", "text"), "--all": None},
    }
    return flags.get(verb, {})


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("replay x --out", ["--output"]),
        ("replay --", ["--help", "--output"]),
        ("--out", []),
        ("explain --", ["--all", "--config-dir", "--format", "--help"]),
        ("check --", ["--config-dir", "--help", "--multirun"]),
        ("explain --format ", ["json", "text"]),
        ("explain --format te", ["text"]),
        ("explain --format=te", ["--format=text"]),
        ("explain --config-dir ", []),
        ("explain --all engine.warm_up=t", ["engine.warm_up=true"]),
        ("explain --format json engine.warm_up=t", ["engine.warm_up=true"]),
        ("--cfg j", ["job"]),
    ],
)
def test_flags_of_a_verb_and_their_values(
    space: ConfigSpace, typed: str, offered: list[str]
) -> None:
    assert complete(f"inferkit {typed}", space, VERBS, flags_of) == offered


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("explain scheduler.b", ["scheduler.batch_size", "scheduler.batch_size="]),
        ("explain ran", ["rank."]),
        ("explain rank.", ["rank.heads", "rank.kv_heads"]),
        ("explain parallel=tp2 rank.h", ["rank.heads"]),
        ("explain parallel=nope rank.h", ["rank.heads"]),
        ("check rank.", []),
    ],
)
def test_keys_and_derived_values_may_be_explained(
    space: ConfigSpace, typed: str, offered: list[str]
) -> None:
    def derived_names(overrides: Sequence[str], space: ConfigSpace) -> list[str]:
        assert all("=" in text for text in overrides)
        return ["parallel.attn_dp_size", "rank.heads", "rank.kv_heads"]

    assert complete(f"inferkit {typed}", space, VERBS, flags_of, derived_names) == offered


def test_a_new_word_may_be_anything(space: ConfigSpace) -> None:
    found = complete("inferkit ", space, VERBS)

    assert {"check", "model=", "+role=", "scheduler.", "parallel="} <= set(found)
    assert not {"schema/", "hydra."} & set(found)
    assert complete("inferkit check ", space, VERBS) == [one for one in found if one not in VERBS]


def test_paths_are_completed(
    space: ConfigSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "more.gguf").touch()
    (tmp_path / ".hidden").touch()
    monkeypatch.chdir(tmp_path)

    assert complete("inferkit model.path=./mo", space, VERBS) == [
        "model.path=./models/",
        "model.path=./more.gguf",
    ]
    assert complete(f"inferkit model.path={tmp_path}/", space, VERBS) == [
        f"model.path={tmp_path}/models/",
        f"model.path={tmp_path}/more.gguf",
    ]
    assert complete("inferkit model.path=/no/such/", space, VERBS) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "write -sc install=bash"),
        (["install"], "nothing is no shell"),
        (["install=tcsh"], "tcsh is no shell whose completion is known"),
        (["instal=bash"], "write -sc install=bash"),
        (["install=bahs"], "did you mean bash"),
    ],
)
def test_faulty_commands(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked_shell(words)


def test_a_module_cannot_be_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/inferkit/__main__.py"])
    with pytest.raises(ConfigError, match="Write: inferkit -sc install=fish"):
        asked_shell(["install=fish"])
    monkeypatch.setattr("sys.argv", ["/x/bin/inferkit"])
    assert asked_shell(["install=fish"]) == ("install", "fish")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(tmp_path: Path) -> None:
    """With Hydra's script and a console script of ours."""
    script = tmp_path / "inferkit"
    script.write_text(f"#!{sys.executable}\nfrom inferkit.cli import main\nmain()\n")
    script.chmod(0o755)
    ask = """
eval "$(inferkit -sc install=bash)"
COMP_LINE='inferkit check parallel=dp2' COMP_POINT=99 COMP_CWORD=2
hydra_bash_completion
echo "${COMPREPLY[@]}"
"""
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    answer = subprocess.run(
        ["bash", "-c", ask],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert answer.stderr == ""
    assert answer.stdout.split()[:2] == ["parallel=dp2", "parallel=dp2tp16"]
