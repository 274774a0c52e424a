"""Origins, and the Hydra internals that they stand on."""

import re
from pathlib import Path
from typing import Any

import pytest

from inferkit.config.leaves import unresolved
from inferkit.config.origins import Origin, find_origins
from inferkit.config.space import ConfigSpace

CASES: list[list[str]] = [
    [],
    *([f"+role={role}"] for role in ConfigSpace().options("role")),
    ["+role=decode", "parallel=tp16", "scheduler.batch_size=3", "scheduler.max_new_tokens=7"],
    ["+experiment=qwen3_8b_tp2", "parallel=tp4", "parallel.embed_tp_size=4"],
    ["model=qwen3_235b_a22b", "~model.arch.hidden_act", "+model.arch.rope_scaling={a: {b: 1}}"],
    ["model=qwen3_235b_a22b", "++model.arch.hidden_size=64", "model.arch.vocab_size=3"],
    ["+model.arch={hidden_size:64,layers:[1,2]}", "model.dtype=float32", "data.limit=null"],
    ["scheduler={batch_size:4,max_new_tokens:1}", "model.name=${data.dataset}"],
    ["+scheduler.params.window=4", "++scheduler.params={window:5,other:{a:1}}", "hydra.verbose=1"],
]


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_the_last_origin_of_every_leaf_has_set_what_hydra_composes(
    space: ConfigSpace, overrides: list[str]
) -> None:
    composed = unresolved(space.compose_job(overrides))

    found = find_origins(space, overrides)

    assert {key: origins[-1].value for key, origins in found.items()} == composed


def told(origins: tuple[Origin, ...]) -> list[tuple[str, str, Any]]:
    return [(origin.kind, origin.text, origin.value) for origin in origins]


def test_all_who_set_a_value_are_told_in_order(space: ConfigSpace) -> None:
    found = find_origins(
        space, ["scheduler.max_new_tokens=7", "+role=decode", "parallel=tp4", "data.seed=1"]
    )

    assert told(found["scheduler.max_new_tokens"]) == [
        ("schema", "", 32),  # once, though the option brings a schema that extends the first
        ("role", "+role=decode", 0),
        ("command line", "scheduler.max_new_tokens=7", 7),
    ]
    assert told(found["parallel.world_size"]) == [("schema", "", 1), ("option", "parallel=tp4", 4)]
    assert told(found["data.seed"]) == [("schema", "", None), ("command line", "data.seed=1", 1)]


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("parallel.world_size", r"world_size: 4"),
        ("disagg.http_port", r"  http_port: 8100"),
        ("data.top_p", r"    top_p: float = 1.0"),
        ("scheduler.num_reserved_decode_tokens", r"    num_reserved_decode_tokens: int = 64"),
        ("scheduler.params", r"    params: dict\[str, Any\] = .*"),
    ],
)
def test_a_place_is_the_line_that_sets_the_value(
    space: ConfigSpace, key: str, pattern: str
) -> None:
    origin = find_origins(space, ["+role=decode", "parallel=tp4"])[key][-1]
    root = Path(__file__).parents[2]

    assert origin.place == f"{origin.file}:{origin.line}"
    line = (root / origin.file).read_text("utf-8").splitlines()[origin.line - 1]
    assert re.fullmatch(pattern, line)


def test_options_of_a_folder_of_the_users_own(tmp_path: Path) -> None:
    folder = tmp_path / "parallel"
    folder.mkdir()
    (folder / "mine.yaml").write_text("# why\n\nworld_size: 2\nnode_ips: [a,\n  b]\n")
    found = find_origins(ConfigSpace(config_dir=tmp_path), ["parallel=mine"])

    assert found["parallel.world_size"][-1].place == f"{folder / 'mine.yaml'}:3"
    assert found["parallel.node_ips"][-1].value == ["a", "b"]
    assert found["parallel.node_ips"][-1].line == 4
