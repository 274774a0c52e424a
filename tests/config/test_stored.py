from pathlib import Path

import pytest
import yaml

from inferkit.config.check import Checker
from inferkit.config.compose import load_config
from inferkit.config.provenance import plain, resolved_yaml
from inferkit.config.space import ConfigSpace
from inferkit.config.stored import read_stored
from inferkit.core.errors import ConfigError


def write(path: Path, values: object) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


SHAPE = "hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 1, vocab_size: 64"
SHAPE += ", intermediate_size: 64, max_position_embeddings: 512"


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.seed=3", "data.temperature=0.5"],
        ["+role=decode", "scheduler.num_reserved_decode_tokens=7"],
        ["model=llama", "model.path=null", "model.with_ckpt=false", f"+model.arch={{{SHAPE}}}"],
    ],
    ids=["offline", "decode", "shape"],
)
def test_a_resolved_configuration_comes_back_as_it_was(
    tmp_path: Path, overrides: list[str]
) -> None:
    config = load_config(overrides)
    file = tmp_path / "config.resolved.yaml"
    file.write_text(resolved_yaml(config))

    stored = read_stored(file)

    assert (stored.unknown, stored.unset, stored.misfits) == ((), (), ())
    again = Checker(ConfigSpace()).check_composed(stored.cfg).config
    assert again is not None
    assert type(again.scheduler) is type(config.scheduler)
    assert plain(again) == plain(config)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    values = plain(load_config([]))
    values["scheduler"] |= {"batch_size": "many", "old_key": 1}
    values["gone"] = {"a": 1}
    del values["kv_cache"]["block_size"]

    stored = read_stored(write(tmp_path / "x.yaml", values))

    assert set(stored.unknown) == {"scheduler.old_key", "gone"}
    assert stored.unset == ("kv_cache.block_size",)
    (misfit,) = stored.misfits
    assert misfit.startswith("scheduler.batch_size=many: ")
    assert stored.cfg.kv_cache.block_size == 128


def test_a_secret_is_taken_from_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = plain(load_config([]))
    values["scheduler"]["params"] = {"headers": [{"token": "Bearer ${oc.env:MY_TOKEN}"}]}
    stored = read_stored(write(tmp_path / "x.yaml", values))

    monkeypatch.setenv("MY_TOKEN", "abc")
    assert stored.cfg.scheduler.params["headers"][0]["token"] == "Bearer abc"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is no YAML: "),
        ("- 1\n", "holds list, no configuration"),
        ("\xff", "cannot be read: "),
    ],
)
def test_unreadable_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(text.encode("latin-1"))

    with pytest.raises(ConfigError, match=message):
        read_stored(file)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="x.yaml does not exist"):
        read_stored(tmp_path / "x.yaml")
