from pathlib import Path
from typing import Any

import pytest

from inferkit.config.check import Checker
from inferkit.config.config_file import as_word, words_of_file
from inferkit.config.provenance import plain, resolved_yaml
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "some.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "value",
    [
        *("", "x", "it's", "a\\", "a\\'b", "\\\\'", "a\\b", " a=b,[c]{d}:e ", "\n", "null", "1"),
        *(None, True, False, 3, -1.5e-7, float("inf"), [], [1, "a'", None, [True]], {}, {"a": "b"}),
    ],
    ids=repr,
)
def test_every_value_comes_back_from_its_word(space: ConfigSpace, value: Any) -> None:
    found = space.parse(f"key={as_word(value)}").value()

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["+role=serve", "parallel=dp2tp2", "data.temperature=0.5"],
        ["+role=prefill", "parallel=tp16"],
        ["+role=decode", "scheduler.num_reserved_decode_tokens=7"],
        ["+role=router", "router.prefill_urls=[http://127.0.0.1:1,http://127.0.0.1:2]"],
        ["+role=cluster", "cluster.prefill_overrides='parallel=tp2 scheduler.batch_size=4'"],
        ["model=qwen3_30b_a3b", "model.arch.num_hidden_layers=2", "parallel=ep4"],
    ],
    ids=" ".join,
)
def test_a_resolved_configuration_comes_back(
    space: ConfigSpace, tmp_path: Path, overrides: list[str]
) -> None:
    checker = Checker(space, is_run=False)
    config = checker.check_overrides(overrides).config
    assert config is not None

    again = checker.check_overrides(words_of_file(write(tmp_path, resolved_yaml(config)), space))

    assert again.faults == ()
    assert again.config is not None
    assert plain(again.config) == plain(config)


def test_a_part_lies_on_the_defaults(space: ConfigSpace, tmp_path: Path) -> None:
    file = write(tmp_path, "scheduler: {batch_size: 4, max_new_tokens: 32}\ndata: {seed: 1}\n")

    assert words_of_file(file, space) == ["scheduler.batch_size=4", "data.seed=1"]


def test_a_dictionary_of_the_file_takes_the_place_of_the_other(
    space: ConfigSpace, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.yaml").write_text(
        "_target_: inferkit.models.dense.model.LlamaForCausalLM\nname: own\narch: {a: 1, b: 2}\n"
    )
    (tmp_path / "own.yaml").write_text("defaults: [config, {override model: own}, _self_]\n")
    own = ConfigSpace(config_dir=tmp_path, config_name="own")

    words = words_of_file(write(tmp_path, "model: {arch: {b: 2, c: 3}}"), own)

    assert words == ["~model.arch.a", "++model.arch.c=3"]
    assert own.compose_job(words).model.arch == {"b": 2, "c": 3}
    words = words_of_file(write(tmp_path, "model: {arch: {}}"), own)
    assert own.compose_job(words).model.arch == {}


def test_a_role_is_chosen_as_on_the_command_line(space: ConfigSpace, tmp_path: Path) -> None:
    words = words_of_file(write(tmp_path, "role: prefill\nparallel: {world_size: 1}"), space)

    assert words == ["+role=prefill"]


def test_values_that_are_automatic_anyway_are_no_words(space: ConfigSpace, tmp_path: Path) -> None:
    text = "parallel: {world_size: 2}\nscheduler: {batch_size: 64, max_prefill_tokens: 100}"

    words = words_of_file(write(tmp_path, text), space)

    assert words == ["parallel.world_size=2", "scheduler.max_prefill_tokens=100"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", r"some.yaml line 1: broken YAML"),
        ("- 1", r"some.yaml: holds no configuration: its keys must be names such as 'model'"),
        (
            "num_steps: 1\nttft_s: {p50: 1}",
            r"holds no configuration: its keys are num_steps, ttft_s; those .* are role, allowed_",
        ),
        ("defaults: [a]", r"some.yaml: has a defaults list.* write GROUP=OPTION"),
    ],
)
def test_other_files_are_refused(
    space: ConfigSpace, tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        words_of_file(write(tmp_path, text), space)


def test_a_file_that_is_not_there_is_named(space: ConfigSpace, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read"):
        words_of_file(tmp_path / "none.yaml", space)


def test_mistakes_of_a_file_are_found_as_on_the_command_line(
    space: ConfigSpace, tmp_path: Path
) -> None:
    text = "scheduler: {bath_size: 4, max_new_tokens: many}\nrole: prefil\n"

    faults = Checker(space).check_overrides(words_of_file(write(tmp_path, text), space)).faults

    assert "did you mean +role=prefill?" in str(faults[0])
    assert "scheduler.bath_size=4: there is no such key" in str(faults[1])
    assert "scheduler.max_new_tokens='many': must be an integer" in str(faults[2])
