import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from inferkit.config.check import Checker
from inferkit.config.provenance import resolved_yaml
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError
from inferkit.inspect.diff.compare import compare
from inferkit.inspect.diff.wording import verdict
from inferkit.inspect.recorded import file_snapshot, run_snapshot

MODEL = ("model=qwen3_8b", "model.with_ckpt=false")


@pytest.fixture(scope="module")
def space() -> ConfigSpace:
    return ConfigSpace()


@pytest.fixture
def run_dir(space: ConfigSpace, tmp_path: Path, empty_cache: Path) -> Path:
    """What a run of a model without weights has recorded."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = Checker(space, is_run=False).check_overrides([*MODEL, "parallel=tp2"]).config
    assert config is not None
    (folder / "config.resolved.yaml").write_text(resolved_yaml(config))
    origin = {"kind": "option", "text": "parallel=tp2", "value": 2, "file": "x.yaml", "line": 3}
    write(folder / "origins.json", {"parallel.world_size": [origin]})
    choices = {"hydra/job_logging": "default", "parallel": "tp2", "model": "qwen3_8b"}
    write(folder / "provenance.json", {"choices": choices})
    write(folder / "metrics.json", {"num_requests": 3})
    write(folder / "result.json", {"status": "ok"})
    return folder


def write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def test_a_run_is_as_it_was_recorded(space: ConfigSpace, run_dir: Path) -> None:
    found = run_snapshot(run_dir, space)

    assert found.title == str(run_dir)
    assert found.leaves["parallel.world_size"].value == 2
    assert found.leaves["parallel.world_size"].origins[-1].place == "x.yaml:3"
    assert found.leaves["scheduler.batch_size"].value == 32
    assert found.leaves["scheduler.batch_size"].origins == ()
    assert list(found.choices.items()) == [("model", "qwen3_8b"), ("parallel", "tp2")]
    assert found.metrics == {"num_requests": 3}
    assert {one.name: one.value for one in found.derived}["rank.heads"] == 16
    assert (found.faults, found.notes) == ((), ())


def test_what_has_become_of_a_run_is_noted(space: ConfigSpace, run_dir: Path) -> None:
    write(run_dir / "result.json", {"status": "failed", "error": "no memory"})
    (run_dir / "metrics.json").unlink()
    failed = run_snapshot(run_dir, space)
    (run_dir / "result.json").unlink()
    unended = run_snapshot(run_dir, space)

    assert failed.notes == ("the run ended with status failed: no memory",)
    assert failed.metrics is None
    assert unended.notes == ("has no result.json: the run has not ended, or was killed",)


def test_keys_of_another_version_are_told(space: ConfigSpace, run_dir: Path) -> None:
    file = run_dir / "config.resolved.yaml"
    lines = file.read_text().replace("  limit: null\n", "  old_limit: null\n")
    file.write_text(lines)

    found = run_snapshot(run_dir, space)

    assert found.leaves["data.limit"].value is None
    (fault,) = found.faults
    assert "data.old_limit=null: there is no such key" in fault
    assert "was recorded by a version without data.limit; the defaults are shown" in found.notes


def test_a_folder_without_a_run_is_refused(space: ConfigSpace, run_dir: Path) -> None:
    sweep = run_dir.parent
    with pytest.raises(ConfigError, match=r"no run directory: .*; runs in it are .*/run$"):
        run_snapshot(sweep, space)
    (sweep / "multirun.yaml").touch()
    with pytest.raises(ConfigError, match=r": is a sweep; name .* its cells, as .*/run"):
        run_snapshot(sweep, space)


def test_a_file_that_is_cut_off_is_named(space: ConfigSpace, run_dir: Path) -> None:
    (run_dir / "metrics.json").write_text('{"num')

    with pytest.raises(ConfigError, match=r"metrics.json: cannot be read"):
        run_snapshot(run_dir, space)


def test_a_file_is_the_origin_of_its_keys(space: ConfigSpace, tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(
        "role: prefill\nscheduler:\n  batch_size: 0\n  max_new_tokens: 7\n"
        "model:\n  arch: {hidden_size: 64}\n"
    )

    leaves = file_snapshot(file, space).leaves

    assert leaves["scheduler.max_new_tokens"].origins[-1].place == f"{file}:4"
    assert leaves["model.arch.hidden_size"].origins[-1].place == f"{file}:6"
    batch = leaves["scheduler.batch_size"]
    assert batch.value == 32
    assert [origin.kind for origin in batch.origins] == ["schema", "file", "automatic"]
    assert leaves["disagg.mode"].origins[-1].place.startswith("conf/role/prefill.yaml:")
    assert leaves["data.limit"].origins[-1].kind == "schema"


def test_recorded_values_are_told_where_the_configuration_cannot_run_here(
    space: ConfigSpace, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that it names is not set in this shell."""
    monkeypatch.delenv("MY_API_KEY", raising=False)
    file = run_dir / "config.resolved.yaml"
    text = file.read_text().replace("run_seed: null", "run_seed: 11")
    text = text.replace("max_model_len: 288", "max_model_len: 300")
    file.write_text(
        text.replace("  custom_params: {}", "  custom_params: {api_key: '${oc.env:MY_API_KEY}'}")
    )
    other = run_dir.parent / "other"
    shutil.copytree(run_dir, other)
    changed = (
        file.read_text().replace("run_seed: 11", "run_seed: 12").replace("len: 300", "len: 301")
    )
    (other / "config.resolved.yaml").write_text(changed)

    left, right = run_snapshot(run_dir, space), run_snapshot(other, space)

    assert any("MY_API_KEY" in fault for fault in left.faults)
    found = compare(left, right)
    assert {pair.key for pair in found.leaves} == {"data.run_seed", "engine.max_model_len"}
    assert found.has_effect


def test_the_pool_of_a_run_is_as_it_was(space: ConfigSpace, run_dir: Path) -> None:
    provenance = json.loads((run_dir / "provenance.json").read_text())
    write(run_dir / "provenance.json", provenance | {"kv_blocks": {"full": 40}})

    found = {one.name: one for one in run_snapshot(run_dir, space).derived}

    # 288 tokens are 3 blocks of 128; a token takes 36 layers * 2 * 4 heads * 128 * 2 bytes.
    assert found["kv_cache.blocks"].value == 40
    assert found["kv_cache.blocks"].formula == "recorded by the run, less than the 97 wanted"
    assert found["kv_cache.pool_bytes"].value == 40 * 128 * 36 * 2 * 4 * 128 * 2
    assert found["kv_cache.concurrent_requests"].value == 39 // 3
    assert not any(one.is_at_most for one in found.values())

    more = run_dir.parent / "more"
    shutil.copytree(run_dir, more)
    write(more / "provenance.json", provenance | {"kv_blocks": {"full": 43}})
    compared = compare(run_snapshot(run_dir, space), run_snapshot(more, space))
    assert [pair.name for pair in compared.derived] == [
        "kv_cache.blocks",
        "kv_cache.pool_bytes",
        "kv_cache.concurrent_requests",
    ]
    assert not compared.has_effect
    assert verdict(compared).startswith("the two are the same; how many blocks fitted")


def test_a_value_of_a_file_that_does_not_fit_is_shown_as_it_is(
    space: ConfigSpace, tmp_path: Path
) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("scheduler:\n  batch_size: abc\nown: 3\n")

    found = file_snapshot(file, space)

    batch = found.leaves["scheduler.batch_size"]
    assert batch.value == "abc"
    assert [origin.kind for origin in batch.origins] == ["schema", "file"]
    assert found.leaves["own"].value == 3
    assert len(found.faults) == 2


def test_a_cell_that_ended_early_is_told_from_what_is_no_run(space, tmp_path):
    with pytest.raises(ConfigError, match="is no run directory"):
        run_snapshot(tmp_path, space)
    (tmp_path / "cell.log").write_text("no memory")
    with pytest.raises(ConfigError, match=f"ended before its run began.*{tmp_path / 'cell.log'}"):
        run_snapshot(tmp_path, space)
