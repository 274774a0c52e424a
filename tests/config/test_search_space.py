"""What is checked of a sweep that searches."""

import pytest
from omegaconf import OmegaConf

from inferkit.config.search_space import (
    GRID_SWEEPER,
    direction_fault,
    is_search,
    probes,
    search_faults,
    searched_keys,
)
from inferkit.config.space import ConfigSpace


@pytest.fixture(scope="module")
def space() -> ConfigSpace:
    return ConfigSpace()


def rows(space: ConfigSpace, *overrides: str, **params: str) -> list[tuple[str, ...]]:
    named = {key.replace("__", "."): value for key, value in params.items()}
    cells, faults = probes(space, overrides, named)
    assert faults == []
    assert [cell.number for cell in cells] == list(range(len(cells)))
    return [cell.overrides for cell in cells]


def test_a_choice_is_checked_whole_and_an_interval_at_its_ends(space):
    assert rows(space, "a.x=choice(1,2,3)") == [("a.x=1",), ("a.x=2",), ("a.x=3",)]
    assert rows(space, "a.x=1,2") == [("a.x=1",), ("a.x=2",)]
    assert rows(space, "a.x=interval(0.5,2)") == [("a.x=0.5",), ("a.x=2.0",)]
    assert rows(space, "a.x=int(interval(1,16))") == [("a.x=1",), ("a.x=16",)]
    assert rows(space, "a.x=tag(log,int(interval(1,16)))") == [("a.x=1",), ("a.x=16",)]


def test_a_search_may_try_the_end_of_a_range(space):
    assert rows(space, "a.x=range(1,5)") == [("a.x=1",), ("a.x=5",)]
    assert rows(space, "a.x=range(16,70,16)") == [("a.x=16",), ("a.x=64",)]


def test_axes_vary_one_by_one_and_then_all(space):
    found = rows(space, "a.x=choice(1,2,3)", "b.y=int(interval(4,5))", "c.z=6")
    assert found == [
        ("a.x=1", "b.y=4", "c.z=6"),
        ("a.x=2", "b.y=4", "c.z=6"),
        ("a.x=3", "b.y=4", "c.z=6"),
        ("a.x=1", "b.y=5", "c.z=6"),
        ("a.x=3", "b.y=5", "c.z=6"),
    ]


def test_the_command_line_replaces_an_axis_of_a_file(space):
    assert rows(space, "a.x=7", a__x="choice(1,2)", b__y="3") == [("a.x=7", "b.y=3")]


def test_settings_of_the_sweep_have_one_value(space):
    cells, faults = probes(space, ["hydra.sweeper.n_trials=3,4", "sweep.slo.ttft_s=1,2"], {})
    assert cells == [] and len(faults) == 2


@pytest.mark.parametrize(
    ("objective", "direction", "wanted"),
    [
        ("output_tokens_per_s", "minimize", "maximize"),
        ("ttft_s.p99", "maximize", "minimize"),
        ("output_tokens_per_s", "maximize", None),
        ("tpot_s.p50", "minimize", None),
        ("tpot_s.p50", "", None),
    ],
)
def test_a_search_for_the_worst_is_refused(objective, direction, wanted):
    hydra = OmegaConf.create(
        {"sweeper": {"direction": direction}} if direction else {"sweeper": {}}
    )
    fault = direction_fault(hydra, objective)
    assert (fault is None) == (wanted is None)
    if fault is not None:
        assert objective in fault.problem
        assert fault.fix.add == (f"hydra.sweeper.direction={wanted}",)


OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ({"direction": "max"}, ["is no direction of a search; allowed: maximize, minimize"]),
        ({"direction": ["maximize", "minimize"]}, ["is no direction of a search"]),
        ({"n_trials": 0}, ["allowed is an integer >= 1"]),
        ({"n_trials": -1, "n_jobs": 0}, ["allowed is an integer >= 1"] * 2),
        ({"max_failure_rate": 1.5}, ["allowed is a number from 0 to 1"]),
        ({"n_trials": 1, "n_jobs": 1, "max_failure_rate": 0.0}, []),
    ],
)
def test_settings_that_break_a_search_off_are_refused(values, problems):
    sweeper = {"_target_": OPTUNA, "direction": "maximize"} | values
    faults = search_faults(OmegaConf.create({"sweeper": sweeper}), "output_tokens_per_s")
    assert len(faults) == len(problems)
    for fault, problem in zip(faults, problems, strict=True):
        assert problem in fault.problem and fault.given and fault.fix is not None


def test_a_sweeper_of_another_name_searches():
    assert not is_search(OmegaConf.create({"sweeper": {"_target_": GRID_SWEEPER}}))
    assert is_search(OmegaConf.create({"sweeper": {"_target_": "hydra_plugins.x.Sweeper"}}))


def test_keys_that_a_search_varies(space):
    given = ["a.x=7", "b.y=choice(1)", "+c.z=interval(0,1)", "d.w=3", "hydra.sweeper.n_trials=2"]
    assert searched_keys(space, given, {"a.x": "choice(1,2)", "e.v": "1,2"}) == [
        "e.v",
        "b.y",
        "c.z",
    ]
