import pytest

from inferkit.config.keys import describe_type, find_key, leaf_keys, similar_keys
from inferkit.config.schema import DataConfig, DType
from inferkit.config.space import ConfigSpace


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("scheduler.bath_size", ["scheduler.batch_size"]),
        ("schduler.batch_size", ["scheduler.batch_size"]),
        ("batch_size", ["scheduler.batch_size"]),
        ("scheduler.maxnewtokens", ["scheduler.max_new_tokens"]),
        ("kv_cache.batch_size", ["scheduler.batch_size"]),
        ("Model.Dtype", ["model.dtype"]),
        ("seed", ["data.seed", "load.seed"]),
        ("scheduler.colour", []),
        ("xyz", []),
    ],
)
def test_similar_keys(space: ConfigSpace, written: str, meant: list[str]) -> None:
    assert similar_keys(written, list(leaf_keys(space.compose_job()))) == meant


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (int, "an integer"),
        (float | None, "a number or null"),
        (bool, "true or false"),
        (DType, "one of float32, bfloat16, float16"),
        (list[str], "a list such as '[a,b]'"),
        (list[int], "a list such as '[1,2]'"),
        (dict[str, int], "a dictionary such as '{a:1}'"),
    ],
)
def test_describe_type(hint: object, text: str) -> None:
    assert describe_type(hint) == text


def test_describe_type_of_a_node_names_its_keys() -> None:
    assert describe_type(DataConfig).startswith("set through one of its keys: dataset, ")


def test_find_key_knows_free_dictionaries_and_nested_nodes(space: ConfigSpace) -> None:
    cfg = space.compose_job()

    assert find_key(cfg, "scheduler.params.anything.below").is_free
    assert find_key(cfg, "disagg.transfer.num_threads").hint is int
    unknown = find_key(cfg, "disagg.transfer.threads")
    assert not unknown.is_known
    assert unknown.parent == "disagg.transfer"
    assert "num_threads" in unknown.siblings
