"""Snapshots of overrides: values, origins, faults; and their way through JSON."""

import json

import pytest

from inferkit.config.space import ConfigSpace
from inferkit.inspect.snapshot import Snapshot
from inferkit.inspect.take import NO_MODEL_FILES, take_snapshot

pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.fixture(scope="module")
def space() -> ConfigSpace:
    return ConfigSpace()


def last(snapshot: Snapshot, key: str) -> tuple[object, str]:
    leaf = snapshot.leaves[key]
    return leaf.value, leaf.origins[-1].kind


def test_every_leaf_of_the_configuration_has_a_value_and_an_origin(space: ConfigSpace) -> None:
    found = take_snapshot(["+role=decode", "parallel=dp2", "scheduler.batch_size=8"], space)

    assert found.title == "+role=decode parallel=dp2 scheduler.batch_size=8"
    assert found.role == "decode"
    assert list(found.choices)[:3] == ["model", "platform", "parallel"]
    assert (found.choices["parallel"], found.choices["scheduler"]) == ("dp2", "decode")
    assert list(found.leaves)[:3] == ["role", "allowed_targets", "data.dataset"]
    assert [key for key, leaf in found.leaves.items() if not leaf.origins] == []
    assert last(found, "scheduler.batch_size") == (8, "command line")
    assert last(found, "scheduler.num_reserved_decode_tokens") == (64, "schema")
    assert last(found, "scheduler.max_prefill_tokens") == (2048, "automatic")
    assert last(found, "disagg.http_port") == (8100, "role")
    assert last(found, "parallel.world_size") == (2, "option")
    # Its files are not here, so neither is the context that a role takes from it.
    assert last(found, "engine.max_model_len") == (0, "schema")
    assert found.notes == (NO_MODEL_FILES,)
    assert found.faults == ()


def test_it_tells_who_chose_an_option(space: ConfigSpace) -> None:
    found = take_snapshot(["+experiment=qwen3_8b_tp2", "parallel=tp4"], space)

    def told(group: str) -> list[tuple[str, str, object]]:
        return [(one.kind, one.place, one.value) for one in found.choosers[group]]

    assert [kind for kind, _, _ in told("parallel")] == ["primary", "experiment", "command line"]
    assert [value for _, _, value in told("parallel")] == ["tp1", "tp2", "tp4"]
    kind, place, value = told("model")[-1]
    assert (kind, value) == ("experiment", "qwen3_8b")
    assert place.startswith("conf/experiment/qwen3_8b_tp2.yaml:")
    assert list(found.choosers) == list(found.choices)


def test_of_faulty_overrides_it_shows_the_others_and_the_faults(space: ConfigSpace) -> None:
    words = ["scheduler.bath_size=3", "scheduler.max_new_tokens=5", "model.name=${nope.x}"]
    found = take_snapshot([*words, "parallel=tp15"], space)

    assert found.leaves["scheduler.max_new_tokens"].value == 5
    assert last(found, "engine.max_model_len") == (256 + 5, "automatic")
    assert found.leaves["model.name"].value == "${nope.x}"
    assert found.choices["parallel"] == "tp1"
    assert "scheduler.bath_size" not in found.leaves
    assert found.derived == ()
    told = " ".join(found.faults)
    assert len(found.faults) == 3
    for word in ("scheduler.bath_size=3", "parallel=tp15", "nope"):
        assert word in told


def test_sizes_that_do_not_divide_are_no_reason_to_fail(space: ConfigSpace) -> None:
    found = take_snapshot(["parallel.attn_tp_size=3"], space)

    assert found.leaves["scheduler.batch_size"].value == 0
    assert "does not divide" in found.faults[0]


def test_interpolations_are_resolved_and_their_text_is_kept(space: ConfigSpace) -> None:
    found = take_snapshot(["model.name=${data.dataset}-x"], space)

    assert found.leaves["model.name"].value == "default-x"
    assert found.leaves["model.name"].origins[-1].value == "${data.dataset}-x"


@pytest.mark.parametrize(
    "words", [["model=qwen3_235b_a22b", "parallel=dp8tp2"], ["+role=prefill", "parallel=tp3"]]
)
def test_it_comes_back_from_json(space: ConfigSpace, words: list[str]) -> None:
    found = take_snapshot(words, space)

    assert Snapshot.from_json(json.loads(json.dumps(found.to_json()))) == found
