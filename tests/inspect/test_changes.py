"""What differs between a recorded run and its replay. What is reported before: test_replay.py."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from inferkit.config.provenance import record, resolved_yaml, write_text
from inferkit.config.stored import StoredConfig
from inferkit.inspect.changes import found_by_ranks, role_changes
from inferkit.inspect.run_directory import RecordedRun
from tests.config.configs import BASE, changed


def write_config(folder: Path, **values: Any) -> None:
    write_text(folder / "config.resolved.yaml", resolved_yaml(changed(**values)))


def test_what_ranks_find_otherwise(tmp_path: Path) -> None:
    then = {
        "model": {"path": "a", "weights": [1]},
        "kv_blocks": {"full": 96},
        "platform": "cpu",
        "weights_bytes": 3,
    }
    run = RecordedRun(
        folder=tmp_path, stored=StoredConfig(cfg=OmegaConf.structured(BASE)), provenance=then
    )
    record(tmp_path, **then)
    assert list(found_by_ranks(run, tmp_path)) == []

    record(tmp_path, model={"weights": [2]}, kv_blocks={"full": 6})
    assert [(change.name, change.text) for change in found_by_ranks(run, tmp_path)] == [
        ("the model", "other files"),
        ("KV blocks", "full 96 -> full 6"),
    ]


def test_roles_that_are_composed_otherwise(tmp_path: Path) -> None:
    then, now = tmp_path / "then", tmp_path / "now"
    write_config(then / "prefill0", scheduler__batch_size=4, disagg__http_port=1)
    write_config(now / "prefill0", scheduler__batch_size=8, disagg__http_port=2)
    write_config(then / "service" / "decode0", platform__num_threads=1)
    write_config(now / "service" / "decode0", platform__num_threads=2)
    write_config(then / "decode0.2")

    (change,) = role_changes(then, now)
    assert (change.name, change.text) == ("prefill0 scheduler.batch_size", "4 -> 8")
