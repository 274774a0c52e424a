"""Deployments under conf/experiment: each composes, passes the checks and says how it is run."""

import shlex

import pytest

from inferkit.config import memory
from inferkit.config.check import Checker
from inferkit.config.space import CONF_DIR, ConfigSpace
from inferkit.inspect.summary import summary

FOLDER = CONF_DIR.resolve() / "experiment"
NAMES = ConfigSpace().options("experiment")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 16 * 2**30)


@pytest.mark.parametrize("name", NAMES)
def test_it_passes_every_check(space: ConfigSpace, name: str) -> None:
    checked = Checker(space, is_run=False).check_overrides([f"+experiment={name}"])

    assert checked.faults == ()
    # It has no weights of its own, and nothing else is in the way.
    assert [warning.key for warning in checked.warnings] == ["model.path"]
    assert checked.config is not None
    assert checked.config.role is None
    assert "per token" in summary(checked)


@pytest.mark.parametrize("name", NAMES)
def test_its_name_says_what_is_split_how(space: ConfigSpace, name: str) -> None:
    model, _, split = name.rpartition("_")
    choices = space.compose([f"+experiment={name}"]).hydra.runtime.choices
    parallel = Checker(space, is_run=False).check_overrides([f"+experiment={name}"]).config

    assert choices.model.startswith(model)
    assert parallel is not None
    if split.startswith("ep"):  # the same experts by attention in parallel, or by its split
        assert parallel.parallel.moe_ep_size == int(split[2:])
    else:
        assert choices.parallel == split


@pytest.mark.parametrize("name", NAMES)
def test_it_opens_with_its_command(
    space: ConfigSpace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2**60)
    package, command, why = (FOLDER / f"{name}.yaml").read_text("utf-8").splitlines()[:3]
    words = shlex.split(command.removeprefix("# "))

    assert package == "# @package _global_"
    assert words[:4] == ["python", "-m", "inferkit", f"+experiment={name}"]
    assert why.startswith("# ")
    # The folder of the example is not here; a Hugging Face id is as good as one.
    assert [word.partition("=")[0] for word in words[4:]] == ["model.path"]
    assert Checker(space).check_overrides([words[3], "model.path=org/any"]).faults == ()


@pytest.mark.parametrize("name", NAMES)
def test_it_does_not_run_without_weights_or_memory(space: ConfigSpace, name: str) -> None:
    weightless = Checker(space).check_overrides([f"+experiment={name}"])
    random = Checker(space).check_overrides([f"+experiment={name}", "model.with_ckpt=false"])

    assert [fault.key for fault in weightless.faults] == ["model.path"]
    # Eight billion weights fit into the 16 GiB of this machine, once.
    fits = name == "qwen3_8b_tp1"
    assert [fault.key for fault in random.faults] == ([] if fits else ["model"])


def test_the_command_line_beats_an_experiment(space: ConfigSpace) -> None:
    overrides = ["+experiment=qwen3_8b_tp2", "parallel=tp4", "scheduler.batch_size=3"]

    for order in (overrides, overrides[::-1]):
        checked = Checker(space, is_run=False).check_overrides(order)
        assert checked.config is not None
        assert checked.config.parallel.world_size == 4
        assert checked.config.scheduler.batch_size == 3


def test_an_experiment_is_added_with_a_plus(space: ConfigSpace) -> None:
    (fault,) = Checker(space).check_overrides(["experiment=qwen3_8b_tp1"]).faults[:1]

    assert "so its options are added with one '+'" in str(fault)
