import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from inferkit.config.identity import (
    LEFT_OUT,
    RunKeys,
    code_files,
    component_files,
    run_key,
)
from inferkit.config.provenance import plain
from inferkit.config.schema import InferenceConfig
from tests.config.configs import BASE, changed, in_role

LLAMA = "inferkit.models.dense.model.LlamaForCausalLM"


@pytest.fixture(scope="module")
def keys() -> RunKeys:
    return RunKeys()


def test_equal_configurations_have_one_key(keys: RunKeys) -> None:
    assert run_key(BASE) == keys.key(BASE) == keys.key(changed())
    assert len(run_key(BASE)) == 64


def test_places_do_not_count(keys: RunKeys) -> None:
    places = {
        "parallel__master_port": 29500,
        "disagg__bootstrap_port": 1,
        "disagg__http_port": 2,
        "disagg__http_host": "0.0.0.0",
        "disagg__zmq_port": 3,
        "disagg__router_url": "http://10.0.0.1:8000",
        "disagg__secret_env": "SECRET",
        "router__host": "0.0.0.0",
        "router__port": 4,
        "router__prefill_urls": ["http://10.0.0.9:1"],
        "sweep__skip_invalid": True,
        "cluster__prefill_overrides": "disagg.http_port=7 +router.port=8",
    }

    for name, value in places.items():
        assert keys.key(changed(**{name: value})) == keys.key(BASE), name


def test_every_key_that_is_left_out_exists() -> None:
    values = plain(BASE)
    for key in LEFT_OUT:
        node = values
        for part in key.split("."):
            node = node[part]


def test_what_changes_the_result_counts(keys: RunKeys) -> None:
    others: list[InferenceConfig] = [
        changed(data__seed=1),
        changed(scheduler__batch_size=3),
        changed(parallel__node_ips=["10.0.0.1", "10.0.0.2"]),
        changed(router__prefill_urls=["http://10.0.0.1:1", "http://10.0.0.2:1"]),
        changed(cluster__prefill_overrides="parallel=tp2"),
        changed(model__arch={"hidden_size": 64}),
        changed(load__rate=1.0),
        replace(BASE, role="cluster"),
    ]

    assert len({keys.key(config) for config in [BASE, *others]}) == len(others) + 1


def test_files_of_model_count_and_their_place_does_not(tmp_path: Path) -> None:
    def model(name: str, hidden: int, weight: bytes) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"hidden_size": hidden}))
        header = b'{"a":1}'
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with (folder / "model.safetensors").open("ab") as file:
            file.write(weight)
        (folder / "README.md").write_text(name)
        return folder

    one, same = model("one", 1, b"1234"), model("same", 1, b"1234")
    changed_data = model("changed", 1, b"1235")
    other, longer = model("other", 2, b"1234"), model("longer", 1, b"12345")

    def key(folder: Path, *, with_ckpt: bool = True) -> str:
        return run_key(changed(model__path=str(folder), model__with_ckpt=with_ckpt))

    assert key(one) == key(same)
    assert len({key(one), key(other), key(longer), key(changed_data)}) == 4
    assert key(one, with_ckpt=False) == key(longer, with_ckpt=False)
    facts = RunKeys().facts(changed(model__path=str(one)))
    assert set(facts["model"]) == {"config.json", "model.safetensors"}


def test_embedded_model_and_hub_id_count_by_name(keys: RunKeys) -> None:
    assert keys.facts(changed(model__path="pypi:a==1"))["model"] == {"embedded": "pypi:a==1"}
    assert keys.facts(changed(model__path="owner/a"))["model"] == {"hub": "owner/a"}
    assert keys.key(changed(model__path="owner/a")) != keys.key(changed(model__path="owner/b"))


def test_a_role_keeps_its_key_when_its_embedded_model_is_fetched(
    keys: RunKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"model__path": "pypi:m==1", "model___target_": LLAMA}
    unknown, known, other = (
        in_role(engine__max_model_len=length, **model) for length in (0, 512, 100)
    )
    monkeypatch.setenv("INFERKIT_CACHE", str(tmp_path))
    before = keys.key(unknown)
    (tmp_path / "m-1").mkdir()
    shape = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    shape |= {"num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 512}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape}
    (tmp_path / "m-1" / "config.json").write_text(json.dumps(config))

    assert keys.key(known) == before
    assert keys.key(other) != before


def test_lines_of_the_data_set_count(tmp_path: Path) -> None:
    data, copy = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    data.write_text('{"prompt": "a"}\n')
    copy.write_text('{"prompt": "a"}\n')
    before = run_key(changed(data__dataset_path=str(data)))
    assert run_key(changed(data__dataset_path=str(copy))) == before
    data.write_text('{"prompt": "b"}\n')
    assert run_key(changed(data__dataset_path=str(data))) != before


def test_code_is_that_of_package_models_and_options() -> None:
    files = code_files()

    assert {"config/schema.py", "conf/config.yaml", "models/dense/arch.py"} <= set(files)
    assert not any("__pycache__" in name or name.endswith(".md") for name in files)


def test_code_hash_sees_a_changed_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = code_files(tmp_path)
    (tmp_path / "a.pyc").write_text("")
    (tmp_path / ".a.swp").write_text("")
    assert code_files(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert code_files(tmp_path) != before


def test_code_of_a_users_component_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine_for_identity"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('never imported')\n")
    (package / "schedule.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = changed(scheduler___target_="mine_for_identity.schedule.Mine")
    before = run_key(cfg)
    assert set(component_files("mine_for_identity")) == {"__init__.py", "schedule.py"}
    (package / "schedule.py").write_text("x = 2\n")
    assert run_key(cfg) != before
    assert "mine_for_identity" not in sys.modules
    assert component_files("no_such_package") == {}
