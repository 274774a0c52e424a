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
        "data.limit=${oc.env:NOT_SET}: the environment variable NOT_SET is not set; set it, or "
        "give a default: ${oc.env:NOT_SET,VALUE}",
        "data.seed=${nope.x}: there is no key nope.x to take the value from",
        "parallel.node_ips[1]=${gone}: there is no key gone to take the value from",
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


@pytest.mark.parametrize(
    ("value", "problem", "use"),
    [
        ("${data.limitt}", "did you mean data.limit?", "data.seed=${data.limit}"),
        ("${oc.env:NOT_SET}", "NOT_SET is not set", "data.seed=${oc.env:NOT_SET,VALUE}"),
        ("${model.name}x", "comes to smolx, and must be an integer or null", None),
        ("${data.seed}", "takes its value from itself", None),
        ("${nope:1}", "there is no resolver called nope", None),
        ("${hydra:job.num}", "${hydra:...} means something in the keys of hydra alone", None),
        ("${now:%S}", "${now:...} means something in the keys of hydra alone", None),
    ],
)
def test_why_an_interpolation_has_no_value(
    space: ConfigSpace, monkeypatch: pytest.MonkeyPatch, value: str, problem: str, use: str | None
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    cfg = space.compose_job()
    cfg.model.name = "smol"
    cfg.data.seed = value

    (fault,) = structure_faults(cfg)

    assert problem in fault.problem
    assert fault.fix is not None
    assert fault.fix.add == ((use,) if use else ())
    assert fault.fix.drop == ("data.seed",)


@pytest.mark.parametrize(
    ("name", "problem", "use"),
    [
        ("api_key", "the environment variable NOT_SET is not set; set it to the secret", ()),
        (
            "folder",
            "the environment variable NOT_SET is not set; set it, or give a default: "
            "${oc.env:NOT_SET,VALUE}",
            ("++scheduler.params.folder=${oc.env:NOT_SET,VALUE}",),
        ),
    ],
)
def test_a_variable_of_an_own_parameter_is_not_set(
    space: ConfigSpace,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    problem: str,
    use: tuple[str, ...],
) -> None:
    """A secret has no default; what is added to a dictionary needs a sign."""
    monkeypatch.delenv("NOT_SET", raising=False)
    cfg = space.compose_job()
    cfg.scheduler.params = {name: "${oc.env:NOT_SET}"}

    (fault,) = structure_faults(cfg)

    assert fault.problem == problem
    assert fault.fix is not None
    assert (fault.fix.add, fault.fix.drop) == (use, (f"scheduler.params.{name}",))
