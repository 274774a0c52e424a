"""A faulty value that a file has set is told with its place."""

from pathlib import Path

import pytest

from inferkit.config.faults import Command
from inferkit.config.preflight import preflight
from inferkit.config.space import ConfigSpace


def message(space: ConfigSpace, *words: str) -> str:
    return preflight(Command(verb="check", overrides=words), space).message


@pytest.fixture
def own_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigSpace:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine" / "experiment" / "uneven.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\nparallel:\n  world_size: 4\n  attn_tp_size: 3\n")
    return ConfigSpace(config_dir=tmp_path / "mine")


def test_the_place_in_a_file(own_space: ConfigSpace) -> None:
    told = message(own_space, "+experiment=uneven", "scheduler.bath_size=3")

    assert "  parallel.attn_tp_size=3\n" in told
    assert "      set in mine/experiment/uneven.yaml:4\n" in told
    assert told.count("set in") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("+experiment=uneven", "parallel.attn_tp_size=5"),
        ("+experiment=uneven", "parallel.attn_tp_size=1", "kv_cache.block_size=0"),
        ("kv_cache.block_size=abc",),
        ("model.path=./nowhere",),
    ],
)
def test_what_was_typed_needs_no_place(own_space: ConfigSpace, words: tuple[str, ...]) -> None:
    told = message(own_space, *words)

    assert told.startswith("inferkit: 1 fault")
    assert "set in" not in told


def test_a_place_in_conf(space: ConfigSpace) -> None:
    assert "set in conf/parallel/tp2.yaml:3\n" in message(
        space, "parallel=tp2", "parallel.cp_size=2"
    )
