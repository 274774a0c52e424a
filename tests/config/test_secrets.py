"""Secrets of a configuration: typed ones are refused, those of the environment are marked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from inferkit.config.check import Checker
from inferkit.config.compose import to_inference_config
from inferkit.config.faults import Command
from inferkit.config.preflight import check_composition, preflight
from inferkit.config.provenance import PROVENANCE_FILE, RESOLVED_FILE, plain, write_run
from inferkit.config.schema import InferenceConfig
from inferkit.config.secrets import (
    hide_secrets_of,
    keep_secrets,
    masking_overrides,
    secret_faults,
    secret_variables,
)
from inferkit.config.space import ConfigSpace
from inferkit.core.secrets import SECRET_VARIABLES, SecretText

PARTS = """
from inferkit.scheduler.scheduler import Scheduler

class Mine(Scheduler):
    def __init__(self, *, api_key="", headers=None, url="", note="", **kwargs):
        super().__init__(**kwargs)
"""
OWN = ["scheduler._target_=secret_parts.parts.Mine", "allowed_targets=[secret_parts]"]


@pytest.fixture
def own(make_package: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of a scheduler that takes secrets; variables that hold some."""
    make_package("secret_parts", parts=PARTS)
    monkeypatch.setenv("MY_CODE", "marker-1")
    monkeypatch.setenv("HF_TOKEN", "hf_marker_2")
    monkeypatch.delenv(SECRET_VARIABLES, raising=False)
    return OWN


def faults(space: ConfigSpace, *words: str) -> list[str]:
    return [str(fault) for fault in Checker(space, is_run=False).check_overrides(words).faults]


@pytest.mark.parametrize(
    ("word", "shown", "instead"),
    [
        ("api_key=abc", "api_key=<secret>", "${oc.env:API_KEY}"),
        ("api_key=1234", "api_key=<secret>", "${oc.env:API_KEY}"),
        ("api_key=${oc.env:KEY,abc}", "api_key=<secret>", "${oc.env:KEY}"),
        ("note='Bearer abcdefgh1'", "note=Bearer <secret>", "Bearer ${oc.env:TOKEN}"),
        (
            "url=http://me:pw1@h/x",
            "url=http://me:<secret>@h/x",
            "http://me:${oc.env:PASSWORD}@h/x",
        ),
        ("headers={X-Api-Key: abc}", "headers.X-Api-Key=<secret>", "${oc.env:X_API_KEY}"),
        ("note=hf_marker_2", "note=<secret HF_TOKEN>", "${oc.env:HF_TOKEN}"),
    ],
)
def test_a_secret_as_plain_text_is_refused_with_what_works(
    space: ConfigSpace, own: list[str], word: str, shown: str, instead: str
) -> None:
    words = (*own, f"+scheduler.params.{word}")

    message = preflight(Command(verb="check", overrides=words), space).message

    told = " ".join(message.split())
    assert f"scheduler.params.{shown} is a secret as plain text" in told
    assert f"put it into an environment variable and write {instead}" in told
    assert "this works" in message
    assert not any(text in message for text in ("abc", "1234", "pw1", "marker"))


def test_the_command_that_is_shown_works(
    space: ConfigSpace, own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSWORD", "marker-3")
    words = (*own, "+scheduler.params.url=http://me:pw1@h/x")
    checked = Checker(space, is_run=False).check_overrides(words)
    (fault,) = checked.faults
    assert fault.fix is not None

    cured = Command(overrides=words).fixed([fault.fix]).overrides

    assert cured[-1] == '++scheduler.params.url="http://me:${oc.env:PASSWORD}@h/x"'
    assert faults(space, *cured) == []


@pytest.mark.parametrize(
    "words",
    [
        ["+hydra.job.env_set.HF_TOKEN=abc"],
        ["hydra.job.env_copy=[HF_TOKEN]"],
        ["+hydra.launcher.setup=['export HF_TOKEN=abc']"],
    ],
)
def test_hydra_s_own_part_holds_none_either(space: ConfigSpace, words: list[str]) -> None:
    found = preflight(Command(verb="check", overrides=tuple(words)), space)

    assert "HF_TOKEN" in found.message and "abc" not in found.message


def test_a_secret_for_one_side_of_a_cluster(space: ConfigSpace, own: list[str]) -> None:
    side = "+scheduler.params.api_key=abc"
    (fault,) = faults(space, "+role=cluster", f'cluster.prefill_overrides="{side}"')
    assert fault.startswith("cluster.prefill_overrides=+scheduler.params.api_key=<secret>: ")


def test_words_for_one_side_take_secrets_from_the_environment_themselves(
    space: ConfigSpace, own: list[str]
) -> None:
    side = "+scheduler.params.api_key=${oc.env:MY_CODE}"
    words = ["+role=cluster", f'cluster.prefill_overrides="{side}"']
    checker = Checker(space, is_run=False)
    composed = checker.check_overrides(words).composed
    assert composed is not None

    plan = checker.plan(words, composed)

    assert side in plan.words["prefill"]
    assert side not in plan.words["decode"]


@pytest.mark.parametrize("option", ["--cfg", "--resolve"])
def test_a_configuration_that_holds_one_is_not_shown(space: ConfigSpace, option: str) -> None:
    command = Command(overrides=("+scheduler.params.api_key=abc",))
    verdict = check_composition(command, space, resolves=option == "--resolve")
    assert not verdict.is_good and "abc" not in verdict.message


def secret_config(space: ConfigSpace) -> tuple[DictConfig, InferenceConfig]:
    words = [
        *OWN,
        "+scheduler.params.api_key=${oc.env:MY_CODE}",
        "+scheduler.params.headers={Authorization: 'Bearer ${oc.env:MY_CODE}', list: "
        "['${oc.env:HF_TOKEN}', plain]}",
        "+scheduler.params.note='again ${scheduler.params.api_key}'",
        "+scheduler.params.url='http://me:${oc.env:MY_CODE}@h'",
        "model.name=${oc.env:MODEL_NAME,tiny}",
    ]
    composed = space.compose_job(words)
    return composed, to_inference_config(composed)


def test_what_runs_has_the_value_and_what_is_recorded_the_variable(
    space: ConfigSpace, own: list[str]
) -> None:
    _, config = secret_config(space)
    params = config.scheduler.params

    assert params["api_key"] == "marker-1" and isinstance(params["api_key"], SecretText)
    assert params["headers"]["Authorization"] == "Bearer marker-1"
    assert params["note"] == "again marker-1"
    assert "marker" not in repr(config) and "marker" not in json.dumps(plain(config))
    assert plain(config)["scheduler"]["params"] == {
        "api_key": "${oc.env:MY_CODE}",
        "headers": {
            "Authorization": "Bearer ${oc.env:MY_CODE}",
            "list": ["${oc.env:HF_TOKEN}", "plain"],
        },
        "note": "again ${scheduler.params.api_key}",
        "url": "http://me:${oc.env:MY_CODE}@h",
    }
    assert plain(config)["model"]["name"] == "tiny"
    assert secret_variables(config) == {"MY_CODE", "HF_TOKEN"}


def test_a_recorded_configuration_takes_its_secrets_again(
    space: ConfigSpace, own: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = secret_config(space)
    hide_secrets_of(config)
    monkeypatch.setenv("INFERKIT_NOTE", "marker-1 is here")

    write_run(tmp_path, config, command="inferkit", overrides=[], error="failed with marker-1")

    written = (tmp_path / RESOLVED_FILE).read_text() + (tmp_path / PROVENANCE_FILE).read_text()
    assert "marker" not in written
    assert "failed with <secret MY_CODE>" in written
    monkeypatch.setenv("MY_CODE", "other-4")
    loaded = OmegaConf.create(yaml.safe_load((tmp_path / RESOLVED_FILE).read_text()))
    read = OmegaConf.merge(OmegaConf.structured(InferenceConfig), loaded)
    assert isinstance(read, DictConfig)
    assert to_inference_config(read).scheduler.params["note"] == "again other-4"


def test_an_unset_variable_is_a_fault(space: ConfigSpace, own: list[str]) -> None:
    (fault,) = faults(space, *own, "+scheduler.params.api_key=${oc.env:AN_API_KEY}")
    assert fault.endswith("the environment variable AN_API_KEY is not set; set it to the secret")


def test_a_secret_is_a_text(
    space: ConfigSpace, own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_CODE", "12")
    (fault,) = faults(space, *own, "+scheduler.params.api_key='${oc.decode:${oc.env:MY_CODE}}'")
    assert "is a secret and must be a text; write ${oc.env:MY_CODE} without oc.decode" in fault


def test_what_is_shown_resolved_has_masks(space: ConfigSpace, own: list[str]) -> None:
    composed, _ = secret_config(space)
    words = [*OWN, *masking_overrides(composed)]

    shown: Any = OmegaConf.to_container(
        space.compose_job([w.replace("++", "+") for w in words]), resolve=True
    )

    assert shown["scheduler"]["params"] == {
        "api_key": "<secret MY_CODE>",
        "headers": {
            "Authorization": "Bearer <secret MY_CODE>",
            "list": ["<secret HF_TOKEN>"],
        },
        "note": "again <secret MY_CODE>",
        "url": "http://me:<secret MY_CODE>@h",
    }


def test_the_defaults_and_every_option_have_none(space: ConfigSpace) -> None:
    for words in ([], ["+role=prefill"], ["+role=cluster"]):
        composed = space.compose_job(words)
        assert list(secret_faults(composed)) == []
        typed = OmegaConf.to_object(composed)
        assert isinstance(typed, InferenceConfig)
        keep_secrets(composed, typed)
        assert secret_variables(typed) == frozenset()


def test_the_shared_secret_of_roles_is_one_of_them(
    space: ConfigSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARED_BY_ALL", "marker-5")
    monkeypatch.delenv(SECRET_VARIABLES, raising=False)
    words = ["+role=router", "disagg.secret_env=SHARED_BY_ALL"]
    config = Checker(space, is_run=False).check_overrides(words).config
    assert config is not None

    assert secret_variables(config) == {"SHARED_BY_ALL"}
