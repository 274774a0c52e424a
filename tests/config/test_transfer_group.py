"""`disagg/transfer`: the one group that lies below a node."""

import sys

import pytest

from inferkit.config.check import Checker
from inferkit.config.faults import Command
from inferkit.config.preflight import preflight
from inferkit.config.space import ConfigSpace

ENGINES = "inferkit.kv_transfer.engines"


def engine_of(space: ConfigSpace, *overrides: str) -> str:
    return str(space.compose_job(overrides).disagg.transfer._target_)


@pytest.mark.parametrize("role", ["prefill", "decode", "cluster"])
def test_a_role_chooses_and_the_command_line_chooses_another(space: ConfigSpace, role: str) -> None:
    assert engine_of(space, f"+role={role}") == f"{ENGINES}.shared_memory.SharedMemoryEngine"
    for words in (
        [f"+role={role}", "disagg/transfer=tcp"],
        ["disagg/transfer=tcp", f"+role={role}"],
    ):
        assert engine_of(space, *words) == f"{ENGINES}.tcp.TcpEngine"
    assert engine_of(space) == ""


def test_both_sides_of_a_cluster_get_the_choice_and_the_router_does_not(space: ConfigSpace) -> None:
    checker = Checker(space, is_run=False)
    words = ["+role=cluster", "disagg/transfer=tcp"]
    checked = checker.check_overrides(words)
    assert checked.faults == () and checked.config is not None

    roles = checker.plan(words, checked.config)

    assert "disagg/transfer=tcp" not in roles.words["router"]
    for role in ("prefill", "decode"):
        assert roles.configs[role].disagg.transfer._target_ == f"{ENGINES}.tcp.TcpEngine"


def test_a_side_s_own_choice_must_be_the_other_s_too(space: ConfigSpace) -> None:
    words = ["+role=cluster", "cluster.prefill_overrides='disagg/transfer=tcp'"]
    faults = Checker(space, is_run=False).check_overrides(words).faults

    assert len(faults) == 1 and "disagg.transfer" in str(faults[0])


@pytest.mark.parametrize(
    ("words", "told", "works"),
    [
        (
            ["+role=decode", "disagg.transfer=tcp"],
            "chooses an option of disagg/transfer; write disagg/transfer=tcp",
            "+role=decode disagg/transfer=tcp",
        ),
        (
            ["+role=decode", "transfer=tcp"],
            "did you mean disagg/transfer=tcp?",
            "+role=decode disagg/transfer=tcp",
        ),
        (["disagg/transfer=tcp"], "has no effect without a role", ""),
        (
            ["+role=decode", "disagg.transfer._target_="],
            "choose an engine: disagg/transfer=shared_memory",
            "+role=decode disagg/transfer=shared_memory",
        ),
    ],
)
def test_what_was_meant_is_told(
    space: ConfigSpace, words: list[str], told: str, works: str
) -> None:
    verdict = preflight(Command(verb="check", overrides=tuple(words)), space)

    assert told in " ".join(verdict.message.split())
    assert verdict.message.endswith(f"this works:\n  python -m inferkit check {works}".rstrip())


def test_a_folder_that_holds_a_group_is_none(space: ConfigSpace) -> None:
    assert "disagg/transfer" in space.groups
    assert "disagg" not in space.groups and not space.is_group("disagg")
    assert space.options("disagg/transfer") == ["memfabric", "mooncake", "shared_memory", "tcp"]


@pytest.mark.parametrize("role", ["prefill", "decode", "cluster"])
@pytest.mark.parametrize(
    ("engine", "package"), [("mooncake", "mooncake"), ("memfabric", "memfabric_hybrid")]
)
def test_an_engine_without_its_package_is_refused_before_the_start(
    space: ConfigSpace, monkeypatch: pytest.MonkeyPatch, role: str, engine: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it could not be imported
    words = [f"+role={role}", f"disagg/transfer={engine}"]

    (fault,) = Checker(space).check_overrides(words).faults

    assert f"needs the package {package}" in fault.problem
    assert f"'inferkit[{engine}]'" in fault.problem and "disagg/transfer=tcp" in fault.problem
    assert fault.fix is not None and fault.fix.add == ("disagg/transfer=shared_memory",)

    checked = Checker(space, is_run=False).check_overrides(words)  # it may be another machine's
    assert checked.faults == ()
    assert any(f"needs the package {package}" in str(found) for found in checked.warnings)
