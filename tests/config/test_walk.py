import pytest
from omegaconf import OmegaConf

from inferkit.config.schema import InferenceConfig
from inferkit.config.space import ConfigSpace
from inferkit.config.walk import set_neutral, structure_faults


def test_default_configuration_has_no_structural_fault(space: ConfigSpace) -> None:
    assert structure_faults(space.compose_job()) == []


def test_missing_values_are_all_named(space: ConfigSpace) -> None:
    cfg = space.compose_job()
    cfg.model.name = "???"
    cfg.runner._target_ = "???"

    faults = structure_faults(cfg)

    assert [str(fault) for fault in faults] == [
        "model.name: has no value; set model.name=...",
        "runner._target_: has no value; set runner._target_=..., or choose an option: runner=...",
    ]


def test_broken_interpolations_are_all_named_with_their_keys(
    space: ConfigSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    cfg = space.compose_job()
    cfg.data.seed = "${nope.x}"
    cfg.data.limit = "${oc.env:NOT_SET}"
    cfg.parallel.node_ips = ["a", "${gone}"]
    cfg.model.name = "${data.dataset}"

    faults = structure_faults(cfg)

    assert [str(fault) for fault in faults] == [
        "data.limit=${oc.env:NOT_SET}: cannot be interpolated: "
        "Environment variable 'NOT_SET' not found",
        "data.seed=${nope.x}: cannot be interpolated: Interpolation key 'nope.x' not found",
        "parallel.node_ips[1]=${gone}: cannot be interpolated: Interpolation key 'gone' not found",
    ]


def test_keys_that_got_past_hydra_are_found(space: ConfigSpace) -> None:
    cfg = space.compose_job()
    OmegaConf.update(cfg, "scheduler.bath_size", 3, force_add=True)
    OmegaConf.update(cfg, "extra", 3, force_add=True)

    assert [str(fault) for fault in structure_faults(cfg)] == [
        "scheduler.bath_size: there is no such key; did you mean scheduler.batch_size?",
        "extra: there is no such key",
    ]


def test_set_neutral_lets_the_rest_become_typed(space: ConfigSpace) -> None:
    cfg = space.compose_job()
    cfg.model.name = "???"
    cfg.data.seed = "${nope}"
    cfg.parallel.node_ips = ["${gone}"]
    OmegaConf.update(cfg, "scheduler.bath_size", 3, force_add=True)

    set_neutral(cfg, [fault.key for fault in structure_faults(cfg)])

    typed = OmegaConf.to_object(cfg)
    assert isinstance(typed, InferenceConfig)
    assert (typed.model.name, typed.data.seed, typed.parallel.node_ips) == ("", None, [])
