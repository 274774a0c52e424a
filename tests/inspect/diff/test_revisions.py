import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferkit.config.arguments import parse_arguments
from inferkit.core.errors import ConfigError
from inferkit.inspect.diff import verb
from inferkit.inspect.diff.compare import Comparison, LeafPair, compare
from inferkit.inspect.diff.revisions import NOT_KNOWN, refused, take_revisions, told_faults
from inferkit.inspect.diff.text import as_text
from inferkit.inspect.diff.worktree import Checkout
from tests.inspect.diff.conftest import Repository
from tests.inspect.diff.snapshots import snapshot

MODEL = ("model=qwen3_8b", "model.with_ckpt=false")
DEADLINE_S = 120


@pytest.fixture(autouse=True)
def clean_up(
    repository: Repository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Nothing of a comparison is left behind."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert repository.worktrees() == 1
    assert list(tmp_path.glob("inferkit-diff-*")) == []


def between(repository: Repository, base: str, head: str, *words: str) -> Comparison:
    checkout = Checkout(folder=repository.folder, prefix=Path("."))
    arguments = parse_arguments(words, verb.add_options)
    return compare(*take_revisions(base, head, arguments, checkout=checkout))


def values(pair: LeafPair) -> tuple[Any, Any]:
    assert pair.left is not None and pair.right is not None
    return pair.left.value, pair.right.value


def test_each_revision_is_composed_by_its_own_code(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With folders of options of its own; neither code of the current folder nor a hook of the
    user takes part."""
    (tmp_path / "inferkit").mkdir()
    (tmp_path / "inferkit" / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    hook = repository.folder / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)

    own = ("--config-dir", str(repository.folder / "own"), "scheduler=mine")
    found = between(repository, "first", "second", *own, *MODEL)

    hook.unlink()
    assert not (tmp_path / "ran").exists()
    commit = repository.git("rev-parse", "first")
    assert found.left.title == f"first ({commit[:10]}): scheduler=mine {' '.join(MODEL)}"
    pairs = {pair.key: pair for pair in found.leaves}
    assert [values(pairs[key]) for key in ("kv_cache.block_size", "scheduler.max_new_tokens")] == [
        (128, 64),
        (5, 6),
    ]
    files = {key: pair.right.origins[-1].file for key, pair in pairs.items() if pair.right}
    assert files["kv_cache.block_size"] == "conf/kv_cache/paged.yaml"
    assert files["scheduler.max_new_tokens"] == "own/scheduler/mine.yaml"
    assert set(pairs) == {*files, "engine.max_model_len"}
    derived = {pair.name for pair in found.derived}
    assert {"kv_cache.block_bytes", "kv_cache.blocks_per_request"} <= derived


def test_code_without_explain_is_asked_for_its_keys(repository: Repository) -> None:
    found = between(repository, "old", "second", *MODEL)

    (pair,) = found.leaves
    assert (pair.key, values(pair)) == ("kv_cache.block_size", (128, 64))
    assert found.left.notes == (NOT_KNOWN,)
    assert found.derived == ()
    assert "A: its code has no `explain`" in as_text(found)


@pytest.mark.parametrize(
    ("base", "head", "message"),
    [
        ("secnd", "first", r"secnd: there is no such revision.*did you mean second\?"),
        ("first", "HEAD~99", r"HEAD~99: there is no such revision in the checkout"),
        ("--help", "first", r"--help: there is no such revision"),
        ("empty", "first", r"empty \(.*\): has no inferkit/__main__.py"),
    ],
)
def test_what_is_no_revision(repository: Repository, base: str, head: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        between(repository, base, head)


def test_a_revision_without_an_option_is_not_compared(repository: Repository) -> None:
    """Also where its code does not tell which overrides it has left out."""
    for base in ("first", "old"):
        found = between(repository, base, "second", "engine=other", *MODEL)

        (fault,) = found.left.left_out
        assert "engine=other: there is no such option" in fault
        assert found.right.left_out == ()
    told = snapshot(choices={"engine": "default"}, faults=("engine=other: no such", "a.b: bad"))
    assert refused(told, ["engine=other", "data.limit=3"]) == ("engine=other: no such",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("", "parallel=tp2"), "with --base the words are overrides of both sides, and '' is none"),
        (("parallel=tp2 data.limit=3",), r"a word of its own: parallel=tp2 data\.limit=3$"),
    ],
)
def test_words_of_two_sides_are_refused(
    repository: Repository, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        between(repository, "first", "second", *words)


def test_an_error_in_the_code_of_a_revision_has_its_place(repository: Repository) -> None:
    message = (
        r"^broken \(.*\): its code cannot explain them: inferkit/config/rules.py:\d: SyntaxError"
    )
    with pytest.raises(ConfigError, match=message):
        between(repository, "broken", "first")


def start(repository: Repository, *words: str) -> "subprocess.Popen[str]":
    """`inferkit diff` by the code of the repository's working tree."""
    return subprocess.Popen(
        [sys.executable, "-m", "inferkit", "diff", *words],
        cwd=repository.folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_the_other_side_is_the_working_tree(repository: Repository) -> None:
    before = (repository.folder / "conf" / "engine" / "default.yaml").read_text()
    repository.write("conf/engine/default.yaml", f"{before}warm_up: false\n")

    process = start(repository, "--base", "second", "--format", "json", *MODEL)
    output, errors = process.communicate(timeout=DEADLINE_S)

    repository.write("conf/engine/default.yaml", before)
    assert process.returncode == 1, errors
    found = json.loads(output)
    assert [pair["key"] for pair in found["keys"]] == ["engine.warm_up"]
    assert found["b"]["title"] == f"working tree: {' '.join(MODEL)}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_ended_comparison_leaves_no_worktree(
    repository: Repository, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(repository, "--base", "slow")
    try:
        until = time.monotonic() + DEADLINE_S
        # The child is running when its worktree is complete; what it does then takes minutes.
        while not list(tmp_path.glob("inferkit-diff-*/tree/models")):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        time.sleep(0.5)
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()

    assert process.returncode == 128 + number
    assert "Traceback" not in errors


def test_faults_are_read_from_the_message_of_a_check() -> None:
    text = (
        "inferkit: 2 faults in the configuration; nothing was started\n\n"
        "  a=1\n      is wrong; use\n      2\n\n  b\n      has no value\n\n"
        "this works:\n  python -m inferkit a=2\n"
    )

    assert told_faults(text) == ["a=1: is wrong; use 2", "b: has no value"]
    assert told_faults("") == []
