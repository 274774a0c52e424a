"""Pins the Hydra internals that the quick composition stands on."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from inferkit.config.schema import DecodeSchedulerConfig, InferenceConfig, SchedulerConfig
from inferkit.config.space import CONF_DIR, ConfigSpace


@pytest.mark.parametrize(
    ("groups", "keys"),
    [
        ([], []),
        (["model=llama"], ["model.path=/models/x", "scheduler.batch_size=8"]),
        (["platform=cpu", "model=qwen3"], ["++data.seed=4", "exe_mode.batch_buckets=[1,2]"]),
        ([], ["+scheduler.params.window=4", "data.limit=null", "model.name=${data.dataset}"]),
        ([], ["+model.arch={hidden_size:64,layers:[1,2]}", "~model.custom_params"]),
    ],
)
def test_groups_first_and_keys_later_compose_as_hydra_does(
    space: ConfigSpace, groups: list[str], keys: list[str]
) -> None:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        try:
            expected = compose("config", [*keys, *groups])
        except HydraException:
            expected = None

    cfg = space.compose_job(groups)
    if expected is None:
        with pytest.raises(HydraException):
            for text in keys:
                space.apply(text, cfg)
        return
    for text in keys:
        space.apply(text, cfg)

    assert cfg == expected
    assert OmegaConf.get_type(cfg) is InferenceConfig


def test_compose_job_is_not_shared(space: ConfigSpace) -> None:
    first = space.compose_job()
    first.scheduler.batch_size = 77

    assert space.compose_job().scheduler.batch_size == 0


def test_options_come_in_natural_order(tmp_path: Path) -> None:
    folder = tmp_path / "sizes"
    folder.mkdir()
    for size in (16, 2, 4):
        (folder / f"tp{size}.yaml").write_text(f"world_size: {size}\n")

    assert ConfigSpace(config_dir=tmp_path).options("sizes") == ["tp2", "tp4", "tp16"]


def test_groups_are_listed_in_the_order_of_the_defaults_list(space: ConfigSpace) -> None:
    assert space.groups[:3] == ["model", "platform", "parallel"]
    with_default = [group for group in space.groups if group in space.defaults]
    assert with_default[-1] == "runner"
    assert space.groups[: len(with_default)] == with_default


def test_the_schema_is_no_option(space: ConfigSpace) -> None:
    assert not space.is_group("schema")
    assert not space.is_group("schema/scheduler")
    assert "schema" not in space.groups
    assert space.options("scheduler") == ["decode", "default", "prefill"]


def test_a_role_can_pull_in_the_decode_schema(tmp_path: Path) -> None:
    folder = tmp_path / "scheduler"
    folder.mkdir()
    (folder / "decode.yaml").write_text(
        "defaults:\n  - /schema/scheduler/decode@_here_\n  - _self_\n"
        "_target_: inferkit.scheduler.scheduler.Scheduler\n"
    )
    space = ConfigSpace(config_dir=tmp_path)

    decode = space.compose(["scheduler=decode"]).scheduler
    assert OmegaConf.get_type(decode) is DecodeSchedulerConfig
    assert decode.num_reserved_decode_tokens == 64
    assert OmegaConf.get_type(space.compose().scheduler) is SchedulerConfig


def test_a_misspelt_key_in_a_file_of_options_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "scheduler"
    folder.mkdir()
    (folder / "mine.yaml").write_text("bath_size: 3\n")

    with pytest.raises(HydraException, match="bath_size"):
        ConfigSpace(config_dir=tmp_path).compose(["scheduler=mine"])


def test_model_targets_of_the_options_of_any_size(space: ConfigSpace) -> None:
    assert space.model_targets["qwen2"] == "inferkit.models.dense.model.Qwen2ForCausalLM"
    without_shape = {option for option in space.options("model") if not option.endswith("b")}
    assert set(space.model_targets) == without_shape
