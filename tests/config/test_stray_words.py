"""Words without a value: options, files, and verbs that are none."""

from pathlib import Path

import pytest

from inferkit.config.space import ConfigSpace
from inferkit.config.stray_words import meant_options, stray_first_word


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("serve", ("+role=serve",)),
        ("cluster", ("+role=cluster",)),
        ("tp2", ("parallel=tp2",)),
        ("llama", ("model=llama",)),
        ("qwen3_8b_tp1", ("+experiment=qwen3_8b_tp1",)),
        ("online", ("runner=online",)),
        ("a.gguf", ("model.path=a.gguf",)),
        ("a.jsonl", ("data.dataset=jsonl", "data.dataset_path=a.jsonl")),
        ("frobnicate", ()),
    ],
)
def test_what_a_word_stands_for(space: ConfigSpace, word: str, options: tuple[str, ...]) -> None:
    assert meant_options(space, word) == options


def test_a_folder_is_a_model(
    space: ConfigSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert meant_options(space, "models/mine") == ("model.path=models/mine",)
    assert meant_options(space, "models/other") == ()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("help", "help is no verb; write inferkit --help"),
        ("serve", "serve is no verb; did you mean +role=serve?"),
        ("data.limit", "data.limit has no value; write data.limit=VALUE"),
        ("chek", "chek is no verb; did you mean check?\nverbs are check, diff; options are"),
        ("data", "data is no verb\nverbs are check, diff; options are written KEY=VALUE"),
        (
            "run",
            "run is no verb, and a run needs none; write the options alone, such as\n  inferkit",
        ),
    ],
)
def test_what_is_told_of_a_first_word(space: ConfigSpace, word: str, told: str) -> None:
    assert stray_first_word(word, ["check", "diff"], space, "inferkit").startswith(told)
