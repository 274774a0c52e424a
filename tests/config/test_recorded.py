import json
from pathlib import Path

import pytest

from inferkit.config.check import Checker
from inferkit.config.origins import find_origins
from inferkit.config.recorded import ORIGINS_FILE, origins_of_job, read_origins, write_origins
from inferkit.config.schema import InferenceConfig
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError

WORDS = ["parallel=tp2", "scheduler.max_new_tokens=4", "data.temperature=1"]


@pytest.fixture
def config(space: ConfigSpace) -> InferenceConfig:
    found = Checker(space, is_run=False).check_overrides(WORDS).config
    assert found is not None
    return found


def test_origins_come_back_with_automatic_values(
    tmp_path: Path, space: ConfigSpace, config: InferenceConfig
) -> None:
    write_origins(tmp_path, config, find_origins(space, WORDS))

    found = read_origins(tmp_path)

    assert found["data.temperature"] == find_origins(space, WORDS)["data.temperature"]
    told = [(origin.kind, origin.text, origin.value) for origin in found["engine.max_model_len"]]
    assert told == [
        ("schema", "", 0),
        ("automatic", "data.input_truncated_len + scheduler.max_new_tokens = 256 + 4", 260),
    ]
    assert found["scheduler.batch_size"][-1].text == (
        "32 for each DP rank: 32 * attn_dp_size = 32 * 1"
    )
    assert found["scheduler.max_prefill_tokens"][-1].text == (
        "max(2048, 2 * batch_size_per_dp_rank = 2 * 32)"
    )
    assert found["platform._target_"][-1].kind == "automatic"
    assert found["kv_cache.num_blocks"][-1].kind == "schema"


def test_the_origins_of_a_job_are_those_of_its_command_line(tmp_path: Path) -> None:
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel/mine.yaml").write_text("world_size: 2\n")
    space = ConfigSpace(config_dir=tmp_path)
    words = ["parallel=mine", "data.limit=3", "hydra.run.dir=x"]

    found = origins_of_job(space.compose(words).hydra)

    assert found.items() >= find_origins(space, words).items()
    assert [one.value for one in found["parallel"]] == ["tp1", "mine"]
    assert set(found) - set(find_origins(space, words)) == set(space.defaults) - HYDRA_GROUPS


HYDRA_GROUPS = {group for group in ConfigSpace().defaults if group.startswith("hydra/")}


def test_who_chose_an_option_comes_back_too(
    tmp_path: Path, space: ConfigSpace, config: InferenceConfig
) -> None:
    write_origins(tmp_path, config, origins_of_job(space.compose(WORDS).hydra))

    found = read_origins(tmp_path)

    assert [one.text for one in found["parallel"]] == ["config", "parallel=tp2"]
    assert found["data.temperature"][-1].text == "data.temperature=1"


def test_where_origins_are_not_known_nothing_is_written(
    tmp_path: Path, config: InferenceConfig
) -> None:
    write_origins(tmp_path, config, {})

    assert read_origins(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / ORIGINS_FILE
    for text in ("{", "[]", json.dumps({"data.limit": [{"kind": "schema"}]})):
        file.write_text(text)
        with pytest.raises(ConfigError, match="origins.json cannot be read"):
            read_origins(tmp_path)
