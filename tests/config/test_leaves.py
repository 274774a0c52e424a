from omegaconf import OmegaConf

from inferkit.config.leaves import flat, unresolved


def test_lists_and_empty_dictionaries_are_leaves() -> None:
    nested = {"a": {"b": 1, "c": {}, "d": {"e": None}}, "f": [{"g": 2}], 3: "x"}

    assert flat(nested) == {"a.b": 1, "a.c": {}, "a.d.e": None, "f": [{"g": 2}], "3": "x"}
    assert flat({}) == {}


def test_interpolations_and_missing_values_stay_as_they_are() -> None:
    cfg = OmegaConf.create({"a": {"b": "${c}", "d": "???"}, "c": 1})

    assert unresolved(cfg) == {"a.b": "${c}", "a.d": "???", "c": 1}
