"""Sets of runs under conf/sweep: each passes the checks and says how it is run."""

import shlex

import pytest

from inferkit.config import memory
from inferkit.config.arguments import parse_arguments
from inferkit.config.preflight import Verdict, preflight
from inferkit.config.space import CONF_DIR, ConfigSpace

FOLDER = CONF_DIR.resolve() / "sweep"
NUM_CELLS = {"batch": 4, "split": 9, "pd_ratio": 16}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2**60)


def command_of(name: str) -> list[str]:
    """Words of the command that the file begins with."""
    package, command = (FOLDER / f"{name}.yaml").read_text("utf-8").splitlines()[:2]
    assert package == "# @package _global_"
    words = shlex.split(command.removeprefix("# "))
    assert words[:3] == ["python", "-m", "inferkit"]
    assert f"+sweep={name}" in words
    # The folder of the example is not here; a Hugging Face id is as good as one.
    return ["model.path=org/any" if word.startswith("model.path=") else word for word in words[3:]]


def check(*words: str) -> Verdict:
    arguments = parse_arguments(words)
    return preflight(arguments.command("inferkit"), arguments.space())


@pytest.mark.parametrize("name", ConfigSpace().options("sweep"))
def test_its_command_passes_every_check(name: str) -> None:
    verdict = check(*command_of(name))

    if "is a plugin of Hydra that is not installed" in verdict.message:
        pytest.skip("its extra is not installed")
    assert verdict.message == ""
    assert verdict.is_multirun
    assert [str(warning) for warning in verdict.warnings] == []
    assert len(verdict.cells) == NUM_CELLS.get(name, 0)


def test_a_value_takes_the_place_of_an_axis() -> None:
    verdict = check("+sweep=split", "parallel=tp4", "scheduler.batch_size=4,8,12")

    assert len(verdict.cells) == 3
    assert {"parallel=tp4", "scheduler.batch_size=12"} < set(verdict.cells[-1].overrides)
