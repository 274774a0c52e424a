"""A shape without weights can be looked at for any machine, and is not run by accident."""

import pytest

from inferkit.config import memory
from inferkit.config.check import Checked, Checker
from inferkit.config.faults import Command
from inferkit.config.preflight import preflight
from inferkit.config.space import ConfigSpace
from inferkit.inspect.summary import summary

SHAPE = ("model=qwen3_235b_a22b", "parallel=tp16")
RANDOM = ("model.with_ckpt=false",)
A3_DIE = ("platform.device_memory=64000000000",)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 16 * 2**30)


def look(space: ConfigSpace, *overrides: str) -> Checked:
    """What the verb `check` sees."""
    return Checker(space, is_run=False).check_overrides(overrides)


def refused(space: ConfigSpace, *overrides: str) -> str:
    """The one reason why a run is not started."""
    (fault,) = Checker(space).check_overrides(overrides).faults
    return str(fault)


def test_a_shape_can_be_looked_at_without_weights(space: ConfigSpace) -> None:
    checked = look(space, *SHAPE, *A3_DIE)

    assert checked.faults == ()
    assert [str(warning) for warning in checked.warnings] == [
        "model.path: has no value: this looks at the shape alone; to run it, set model.path=... "
        "(a Hugging Face folder or id, or a .gguf file), or model.with_ckpt=false for random "
        "weights of the shape in model.arch"
    ]
    assert "none: the shape alone" in summary(checked)
    assert "61,035 MiB to plan with, for each rank" in summary(checked)


def test_a_shape_does_not_run_by_accident(space: ConfigSpace) -> None:
    for overrides in (SHAPE, (*SHAPE, *A3_DIE)):
        assert refused(space, *overrides).startswith("model.path: has no value; set model.path")


def test_the_shape_itself_is_checked(space: ConfigSpace) -> None:
    (fault,) = look(space, *SHAPE, "model.arch.num_key_value_heads=5").faults

    assert "num_key_value_heads" in str(fault)
    assert [fault.key for fault in look(space, "model=qwen3_moe").faults] == ["model.path"]


def test_random_weights_of_a_shape_run_where_they_fit(space: ConfigSpace) -> None:
    checked = Checker(space).check_overrides(["model=qwen3_8b", *RANDOM])

    assert checked.faults == ()
    assert checked.warnings != ()  # 16 GiB leave little room for 32 requests
    assert "none: random weights" in summary(checked)
    assert "only 8,192 MiB are available to a rank" in refused(
        space, "model=qwen3_32b", "parallel=tp2", *RANDOM
    )


def test_a_shape_is_not_refused_for_the_memory_of_this_machine(space: ConfigSpace) -> None:
    checked = look(space, *SHAPE)

    assert checked.faults == ()
    assert [str(warning) for warning in checked.warnings[1:]] == [
        "model: its weights take 28,256 MiB in bfloat16 on each of 16 ranks, but only 1,024 MiB "
        "are available to a rank; choose a smaller model or model.dtype, or another "
        "parallel=<option>; platform.device_memory=BYTES checks it against another machine"
    ]


def test_a_shape_is_refused_for_the_memory_that_is_planned_with(space: ConfigSpace) -> None:
    (fault,) = look(space, *SHAPE, "platform.device_memory=20000000000").faults

    assert "only 19,073 MiB are available to a rank" in str(fault)


def test_a_run_has_no_more_memory_than_the_machine(space: ConfigSpace) -> None:
    assert look(space, *SHAPE, *RANDOM, *A3_DIE).faults == ()
    assert refused(space, *SHAPE, *RANDOM, *A3_DIE).endswith(
        "but only 1,024 MiB are available to a rank; choose a smaller model or model.dtype, or "
        "another parallel=<option>; platform.device_memory=64000000000 is more than this machine "
        "has"
    )


def test_a_run_may_plan_with_less(space: ConfigSpace) -> None:
    text = refused(space, "model=qwen3_8b", *RANDOM, "platform.device_memory=10000000000")

    assert "but only 9,537 MiB are available" in text
    assert "than this machine has" not in text


def test_the_verb_decides_what_is_checked(space: ConfigSpace) -> None:
    overrides = (*SHAPE, *A3_DIE)

    assert preflight(Command(verb="check", overrides=overrides), space).is_good
    message = preflight(Command(overrides=overrides), space).message
    assert "model.path\n      has no value; set model.path=..." in message
