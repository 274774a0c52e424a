"""Faults in the file of an option: its place, the key, and what was meant."""

from pathlib import Path

import pytest

from inferkit.config.overrides import compose_checked
from inferkit.config.space import ConfigSpace


@pytest.mark.parametrize(
    ("file", "text", "choice", "problem"),
    [
        (
            "scheduler/mine",
            "defaults:\n  - default\n  - _self_\nbath_size: 3\n",
            "scheduler=mine",
            " line 4: there is no key scheduler.bath_size; did you mean scheduler.batch_size?",
        ),
        (
            "parallel/mine",
            "# Two lines.\nworld_size: many\n",
            "parallel=mine",
            " line 2: parallel.world_size=many must be an integer",
        ),
        (
            "experiment/mine",
            "# @package _global_\ndata:\n  temperatur: 1\n",
            "+experiment=mine",
            " line 3: there is no key data.temperatur; did you mean data.temperature?",
        ),
        (
            "experiment/mine",
            "data:\n  temperature: 1\n",
            "+experiment=mine",
            ": lacks the line `# @package _global_` at its top, so its keys would go below "
            "experiment",
        ),
        (
            "experiment/mine",
            "# @package _global_\ndefaults:\n  - override /role: serve\n",
            "+experiment=mine",
            " line 2: overrides role, which has no default; choose it on the command line, "
            "+role=...",
        ),
        (
            "experiment/mine",
            "# @package _global_\ndefaults:\n  - /parallel: tp2\n",
            "+experiment=mine",
            " line 2: chooses parallel beside its default; write `override /parallel: ...`",
        ),
    ],
)
def test_what_is_wrong_in_a_file(
    tmp_path: Path, file: str, text: str, choice: str, problem: str
) -> None:
    path = tmp_path / f"{file}.yaml"
    path.parent.mkdir()
    path.write_text(text)

    (fault,) = compose_checked(ConfigSpace(config_dir=tmp_path), [choice]).faults

    assert (fault.given, fault.problem) == (choice, f"{path}{problem}")


def test_an_option_that_a_file_names_and_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "experiment" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("# @package _global_\ndefaults:\n  - override /exe_mode: eagr\n")

    (fault,) = compose_checked(ConfigSpace(config_dir=tmp_path), ["+experiment=mine"]).faults

    assert fault.problem == (
        "experiment/mine.yaml line 2: chooses exe_mode=eagr, and there is no such option; did you "
        "mean exe_mode=eager?\noptions of exe_mode: eager"
    )
