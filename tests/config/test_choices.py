from pathlib import Path

import pytest

from inferkit.config.choices import find_choosers
from inferkit.config.space import ConfigSpace

CASES = [
    [],
    ["parallel=tp2", "model=qwen3_8b"],
    ["+role=decode", "parallel=dp2"],
    ["+experiment=qwen3_8b_tp2", "+role=serve"],
    ["+role=prefill", "scheduler=default", "data.limit=3"],
]


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_the_last_chooser_of_every_group_has_chosen_what_hydra_takes(
    space: ConfigSpace, words: list[str]
) -> None:
    choices = space.compose(words).hydra.runtime.choices
    own = {str(group): option for group, option in choices.items() if "hydra/" not in str(group)}

    found = find_choosers(space, words)

    assert {group: origins[-1].value for group, origins in found.items()} == own


def test_a_place_is_the_line_of_the_defaults_list(space: ConfigSpace) -> None:
    found = find_choosers(space, ["+role=decode"])["scheduler"]

    assert [(one.kind, one.text, one.value) for one in found] == [
        ("primary", "config", "default"),
        ("role", "+role=decode", "decode"),
    ]
    root = Path(__file__).parents[2]
    lines = [(root / one.file).read_text("utf-8").splitlines()[one.line - 1] for one in found]
    assert lines == ["  - scheduler: default", "  - override /scheduler: decode"]


def test_options_that_choose_options_of_other_groups(tmp_path: Path) -> None:
    for name, text in {
        "kit/whole.yaml": "# @package _global_\ndefaults:\n  - /part: small\n  - _self_\n",
        "part/small.yaml": "# @package data\nlimit: 1\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)

    found = find_choosers(ConfigSpace(config_dir=tmp_path), ["+kit=whole"])

    (chosen,) = found["part"]
    assert (chosen.kind, chosen.text, chosen.value) == ("option", "+kit=whole", "small")
    assert chosen.place == f"{tmp_path / 'kit/whole.yaml'}:3"
